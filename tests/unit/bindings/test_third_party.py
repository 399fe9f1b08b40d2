"""Frameworks of other distributions: what their entry points may be, and what a bad one affects."""

from __future__ import annotations

import asyncio
import builtins
import importlib
import logging
import os
import re
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import pytest

import otel_limits
from otel_limits import Enforcing, Event, Limits, Stop
from otel_limits.bindings import known
from otel_limits.bindings.entry_points import (
    Installed,
    entry_points_of,
    installed_entry_points,
)
from otel_limits.bindings.known import OURS, installed_frameworks, know
from otel_limits.bindings.third_party import ThirdPartyFramework
from otel_limits.cli import main
from otel_limits.core.policy import Policy
from otel_limits.runs.registry import LIVE
from otel_limits.runtime import guard
from otel_limits.runtime.runtime import FrameworkImports, Runtime
from otel_limits.settings import children
from otel_limits.settings.table import Settings
from otel_limits.startup import otel_limits_startup
from tests import third_party
from tests.paths import ROOT
from tests.second_framework import BotTool
from tests.third_party import ENTRY_POINTS, install, write_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("faulty")

OWN: Final = ("bots", "bots_limits", "bots_bindings", "bots_bindings.limits")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that distributions are installed in."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(known.FRAMEWORKS)
    yield tmp_path
    known.FRAMEWORKS[:] = before
    for name in OWN:
        sys.modules.pop(name, None)


@pytest.fixture
def drop_new_finders() -> Callable[[], None]:
    """Remove the finders of modules that are added from now on, but not that of wrapt.

    It adds one to each process.
    """
    before = [*sys.meta_path]

    def drop() -> None:
        added = [each for each in sys.meta_path if each not in before]
        for each in added:
            if isinstance(each, FrameworkImports):
                sys.meta_path.remove(each)

    return drop


@pytest.fixture
def start(
    request: pytest.FixtureRequest, drop_new_finders: Callable[[], None]
) -> Callable[..., Runtime]:
    """Enable the installed frameworks in a separate runtime."""

    def begin(*observers: Callable[[Event], None]) -> Runtime:
        points = installed_entry_points().entry_points
        runtime = Runtime(LIVE, [ThirdPartyFramework(each) for each in points])
        request.addfinalizer(runtime.stop)
        request.addfinalizer(drop_new_finders)
        runtime.start(Settings(policy=Policy(limits=Limits(max_turns=3))), observers)
        return runtime

    return begin


def run_bot(*tools: str) -> tuple[str, int]:
    """Return why a bot of the installed framework ended, and after how many calls."""
    bots, asked = importlib.import_module("bots"), tools or ("look",)

    class Endless(bots.Model):  # type: ignore[misc, name-defined]
        calls = 0

        async def ask(self, messages: Any, tools: Any) -> Any:  # noqa: ARG002
            self.calls += 1
            requested = [(name, name, None) for name in asked] if self.calls < 9 else []
            return bots.Reply(tools=requested, tokens=(10, 5))

    async def look(_: Any) -> str:
        return "nothing"

    one = bots.Bot("bob", Endless(), {"look": look})
    return asyncio.run(one.run("go")).reason, one.model.calls


LIMITED: Final = ("max_turns", 3)
UNLIMITED: Final = ("done", 9)


# --- entry points ---------------------------------------------------------------------------------


def test_entry_point_is_found_with_the_distribution_of_its_framework(site: Path) -> None:
    """`check` and `doctor` show the release of that one."""
    install(site)
    (found,) = installed_entry_points().entry_points
    assert (found.waits_for, found.module, found.name) == ("bots", "bots_limits", "BOTS")
    assert (found.distribution, found.framework) == ("bots-limits", "bots")


@pytest.mark.parametrize(
    ("file", "distribution"),
    [("bots/teams.py", "acme-bots"), ("bots/teams/__init__.py", "acme-bots"), ("bots/x.py", None)],
    ids=["module", "package", "another package in the same namespace"],
)
def test_distribution_with_another_name_is_found_by_its_files(
    site: Path, file: str, distribution: str | None
) -> None:
    """Of those that share a namespace, such as `google`, the one with the module."""
    write_metadata(site, "bots-limits", "2.0", "[otel_limits.frameworks]\nbots.teams = b:B\n")
    (write_metadata(site, "acme-bots") / "RECORD").write_text(f"{file},sha256=x,9\n")
    (found,) = installed_entry_points().entry_points
    assert found.framework == (distribution or "bots-limits")


def test_entry_points_survive_as_text(site: Path) -> None:
    """As `run` hands them to the program."""
    install(site, f"{ENTRY_POINTS}bots.teams=bots_limits.teams : TEAMS.all\n")
    installed = installed_entry_points()
    assert len(installed.entry_points) == 2
    assert entry_points_of(installed.text) == installed.entry_points
    assert not installed.broken


@pytest.mark.parametrize(
    "line",
    ["bots", "bots = bots_limits", "bots = :BOTS", "bots-sdk = a:b", "bots = a:b [extra]", "= a:b"],
)
def test_malformed_entry_point_is_reported_and_the_next_one_is_used(site: Path, line: str) -> None:
    """With the distribution, the line, and what to do."""
    install(site, f"[console_scripts]\nnonsense\n{ENTRY_POINTS}{line}\n# text\n[other]\nalso\n")
    installed = installed_entry_points()
    assert [each.waits_for for each in installed.entry_points] == ["bots"]
    assert installed.broken == (
        (
            f"bots-limits: its entry point {line!r} in otel_limits.frameworks is not of the form "
            "'module = binding:OBJECT'. Correct it, or uninstall the distribution."
        ),
    )


@pytest.mark.parametrize(
    "module", ["strands.agent.agent", "strands", "agents.run", "langchain", "langgraph.x", "agents"]
)
def test_framework_of_ours_needs_no_other_binding(site: Path, module: str) -> None:
    """Its calls would be counted twice."""
    install(site, f"{ENTRY_POINTS}{module} = bots_limits:BOTS\n")
    installed = installed_entry_points()
    assert [each.waits_for for each in installed.entry_points] == ["bots"]
    (sentence,) = installed.unused
    assert f"'{module} = bots_limits:BOTS' is not used, as otel-limits itself limits" in sentence


def test_second_binding_of_a_framework_is_not_used(site: Path) -> None:
    """The same of the two is used wherever they are installed."""
    install(site)
    write_metadata(site, "a-bot-binding", entry_points=ENTRY_POINTS.replace("BOTS", "OTHER"))
    installed = installed_entry_points()
    assert [each.name for each in installed.entry_points] == ["OTHER"]
    assert installed.unused == (
        (
            "bots-limits: its entry point 'bots = bots_limits:BOTS' is not used, as a-bot-binding "
            "limits bots. Uninstall one of them."
        ),
    )


def test_distribution_that_occurs_twice_on_the_path_is_read_once(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python imports the first."""
    install(site)
    (site / "later").mkdir()
    write_metadata(site / "later", "Bots.Limits", entry_points=ENTRY_POINTS.replace("BOTS", "OLD"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(site / "later")])
    installed = installed_entry_points()
    assert [each.name for each in installed.entry_points] == ["BOTS"]
    assert not installed.unused


def test_entry_points_that_cannot_be_decoded_are_reported(site: Path) -> None:
    """They are of one distribution, and may be none of a framework."""
    install(site)
    (write_metadata(site, "damaged") / "entry_points.txt").write_bytes(b"[\xff")
    installed = installed_entry_points()
    assert [each.waits_for for each in installed.entry_points] == ["bots"]
    (sentence,) = installed.unused
    assert sentence.startswith("damaged: its entry points cannot be read (UnicodeDecodeError")


def test_damaged_metadata_of_another_distribution_is_ignored(site: Path) -> None:
    """It is read in search of the distribution of a framework."""
    install(site, "[otel_limits.frameworks]\nrobots = bots_limits:BOTS\n")
    (write_metadata(site, "damaged") / "top_level.txt").write_bytes(b"\xff")
    (write_metadata(site, "nameless") / "METADATA").write_bytes(b"\xff")
    (found,) = installed_entry_points().entry_points
    assert found.framework == "bots-limits"


def test_distribution_without_a_readable_name_is_used(site: Path) -> None:
    """Its agents would otherwise run without limits."""
    install(site)
    (site / "bots_limits-2.0.dist-info" / "METADATA").write_bytes(b"\xff")
    (found,) = installed_entry_points().entry_points
    assert found.distribution == "unnamed"


# --- in a process ---------------------------------------------------------------------------------


def test_binding_is_imported_with_its_framework_only(site: Path, start: Any) -> None:
    """A program that does not use it pays nothing."""
    install(site)
    start()
    assert "bots_limits" not in sys.modules
    assert run_bot() == LIMITED
    assert "bots_limits" in sys.modules


FIRST: Final = {
    "binding": ("bots_limits:BOTS", {}),
    "its module": (
        "bots_bindings.limits:BOTS",
        {"__init__": "import bots_limits\nfrom bots_bindings.limits import *", "limits": ""},
    ),
}
"""The entry point, and the modules of a package with the binding, which imports the framework."""


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("is_on", [True, False], ids=["on before", "on with the framework"])
def test_binding_may_be_imported_first(
    site: Path,
    start: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    *,
    is_on: bool,
) -> None:
    """It imports the framework while it is incomplete itself."""
    target, modules = FIRST[name]
    install(site, f"[otel_limits.frameworks]\nbots = {target}\n")
    for module, code in modules.items():
        (site / "bots_bindings").mkdir(exist_ok=True)
        text = code or "from bots_limits import BOTS\n"
        (site / "bots_bindings" / f"{module}.py").write_text(text)
    if is_on:
        start()
    else:  # as under `otel-limits run`, which starts at the end of the framework's import
        with (site / "bots.py").open("a") as file:
            file.write("import builtins\nbuiltins.start_limits()\n")
        monkeypatch.setattr(builtins, "start_limits", start, raising=False)
    importlib.import_module(re.split("[.:]", target)[0])
    assert run_bot() == LIMITED
    assert "not enforced" not in caplog.text


def test_framework_that_is_never_imported_is_silent(
    site: Path, start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """There can be no agent of it."""
    install(site, "[otel_limits.frameworks]\nnot_installed_bots = bots_limits:NONE\n")
    runtime = start()
    assert runtime.enforcement().is_enforcing
    assert caplog.text == ""


BROKEN: Final = {
    "not there": ("bots_limits:OTHER", "", "failed in import (AttributeError("),
    "no module": ("bots_bindings:BOTS", "", "failed in import (ModuleNotFoundError("),
    "raises": ("bots_limits:BOTS", "raise SystemExit(3)", "failed in import (SystemExit(3))"),
    "a class": (
        "bots_limits:BotFramework",
        "",
        "is not an instance of a subclass of BaseFramework",
    ),
    "another object": ("bots_limits:Bot", "", "is not an instance of a subclass of BaseFramework"),
    "gaps": ("bots_limits:BOTS", "BotFramework.gaps = lambda self: 1 / 0", "failed in gaps (Zero"),
    "watch": ("bots_limits:BOTS", "BotFramework.watch = lambda self: 1 / 0", "failed in watch (Ze"),
    "no method": (
        "bots_limits:BOTS",
        'BotFramework.watch = lambda self: self.patches.wrap_all(Model, {"aks": None})',
        "failed in watch (AttributeError(",
    ),
    "no method of one class": (
        "bots_limits:BOTS",
        'BotFramework.watch = lambda self: self.patches.wrap(Bot, "rum", None)',
        "failed in watch (AttributeError(",
    ),
    "reasons": ("bots_limits:BOTS", "BotFramework.stop_reasons = 3", "failed in import (TypeError"),
}
"""An object, code at the end of its module, and the problem that is reported."""


@pytest.mark.parametrize("name", BROKEN)
def test_broken_binding_affects_no_other_framework(
    name: str, site: Path, start: Any, caplog: pytest.LogCaptureFixture, events: list[Event]
) -> None:
    """Reported once, with the distribution, the entry point and what to do."""
    target, code, problem = BROKEN[name]
    install(site, f"[otel_limits.frameworks]\nbots = {target}\n")
    with (site / "bots_limits.py").open("a") as file:
        file.write(code)
    runtime = start(events.append)
    assert run_bot() == run_bot() == UNLIMITED
    (line,) = [each for each in caplog.messages if "not enforced" in each]
    assert line.startswith(
        f"otel-limits: limits are not enforced: bots-limits: its entry point 'bots = {target}' "
    )
    assert problem in line
    assert line.endswith(
        "so agents of bots are not limited. Correct, upgrade or uninstall bots-limits."
    )
    last = {each.framework: each.in_force for each in events if isinstance(each, Enforcing)}
    assert last == {"": True, "bots": False}
    assert runtime.enforcement("strands").is_enforcing


HOOKS: Final = [
    *(f"BotRun.{name}" for name in ("reason_of", "result_of_halt", "with_marker")),
    *(f"BotCall.{name}" for name in ("describe", "tool_results", "note_part", "text_of")),
    *(f"BotCall.{name}" for name in ("note_answer", "tools_of")),
    *(f"BotTool.{name}" for name in ("text_of", "refused", "is_error")),
]

ALWAYS_CALLED: Final = [each for each in HOOKS if "Run" not in each and "refused" not in each]


def break_hook(site: Path, hook: str) -> None:
    """Install a binding one of whose methods always fails."""
    install(site)
    with (site / "bots_limits.py").open("a") as file:
        file.write(f"def fail(*_, **__): 1 / 0\n{hook} = fail\n")


HELD: Final = {
    "max_turns": (Limits(max_turns=3), 3),
    "max_model_calls": (Limits(max_model_calls=3), 3),
    "loop_detected": (Limits(max_identical_tool_calls=3), 3),
    "natural end": (Limits(max_turns=30), 9),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", HELD)
def test_agent_is_limited_despite_a_fault_of_a_hook(
    site: Path, start: Any, caplog: pytest.LogCaptureFixture, name: str, hook: str
) -> None:
    """It never gets the exception, which is counted and logged."""
    limits, expected = HELD[name]
    break_hook(site, hook)
    runtime = start()
    runtime.start(Settings(policy=Policy(limits=limits)))
    try:
        _, calls = run_bot("unknown", "look")
    except otel_limits.LimitReachedError as error:  # without a result of the halt
        calls = error.stop.model_calls if error.stop else 0
    assert calls == expected
    assert "in-flight" not in caplog.text
    assert "ZeroDivisionError" in caplog.text or hook not in ALWAYS_CALLED
    assert runtime.enforcement("bots").is_enforcing


LAPSES: Final = ["BotRun.begin", "BotCall.begin", "BotTool.begin"]


@pytest.mark.parametrize("hook", LAPSES)
def test_call_that_cannot_begin_is_reported_as_not_limited(
    site: Path, start: Any, caplog: pytest.LogCaptureFixture, events: list[Event], hook: str
) -> None:
    """Once, with the place; the agent continues."""
    break_hook(site, hook)
    runtime = start(events.append)
    run_bot()
    run_bot()
    (line,) = [each for each in caplog.messages if "not enforced" in each]
    assert "ZeroDivisionError in fail (bots_limits.py:" in line
    assert not runtime.enforcement().is_enforcing
    last = {each.framework: each.in_force for each in events if isinstance(each, Enforcing)}
    assert last == {"": False, "bots": False}
    runtime.stop()
    runtime.start(Settings(policy=Policy(limits=Limits(max_turns=3))))
    assert runtime.enforcement().is_enforcing


@pytest.mark.parametrize("hook", LAPSES)
def test_process_ends_instead_of_a_call_without_limits(
    site: Path, start: Any, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    """With OTEL_LIMITS_STRICT, before the call."""
    break_hook(site, hook)

    def end(sentences: list[str]) -> None:
        raise KeyboardInterrupt(sentences)

    monkeypatch.setattr(guard, "end_process", end)
    strict = Settings(policy=Policy(limits=Limits(max_turns=3)), strict=True)
    start().start(strict)
    with pytest.raises(KeyboardInterrupt, match="ZeroDivisionError in fail"):
        run_bot()


@pytest.mark.parametrize("where", ["model", "tool"])
def test_fault_outside_of_agents_is_no_lapse(site: Path, start: Any, where: str) -> None:
    """A call that belongs to no agent is not limited anyway."""
    break_hook(site, "BotCall.begin" if where == "model" else "BotTool.begin")
    runtime = start()
    bots = importlib.import_module("bots")

    class Once(bots.Model):  # type: ignore[misc, name-defined]
        async def ask(self, messages: Any, tools: Any) -> Any:  # noqa: ARG002
            return bots.Reply("yes")

    async def look(_: Any) -> str:
        return "nothing"

    one = bots.Bot("bob", Once(), {"look": look})
    if where == "model":
        assert asyncio.run(one.model.ask([], ())).text == "yes"
    else:
        assert asyncio.run(one.use("1", "look", None)) == "nothing"
    assert runtime.enforcement().is_enforcing


def example(word: str) -> str:
    """Return an example of the page that is not generated from a file of the tests."""
    page = (ROOT / "otel_limits/docs/own-framework.md").read_text(encoding="utf-8")
    blocks: list[str] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    return next(each for each in blocks if each.startswith(word))


def test_gap_of_the_page_is_reported(
    site: Path, start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As a release without a method would be."""
    install(site)
    with (site / "bots_limits.py").open("a") as file:
        file.write("from otel_limits.frameworks import Gap\n")
        file.write(f"{example('def gaps')}\nBotFramework.gaps = gaps\ndel Model.stream\n")
    runtime = start()
    importlib.import_module("bots")
    assert "limits are not enforced: bots 1.5 has no bots.Model.stream. Its agents" in caplog.text
    assert not runtime.enforcement("bots").is_enforcing


@dataclass
class Result:
    """The result of a tool that is no text."""

    text: str
    failed: bool = False


def test_tool_of_the_page_whose_results_are_objects() -> None:
    """A refusal and a text of otel-limits get the same form."""
    names: dict[str, Any] = {"BotTool": BotTool, "replace": replace, "Result": Result}
    exec(example("class ObjectTool"), names)  # noqa: S102  our own page
    one = object.__new__(names["ObjectTool"])
    refusal = one.refused("no")
    assert (one.text_of(refusal), one.is_error(refusal)) == ("no", True)
    assert one.with_text(Result("a"), "b") == Result("b")


def test_framework_without_a_result_for_a_halt_raises(site: Path, start: Any) -> None:
    """The caller gets the limit's exception also if the configured action is `halt`."""
    install(site)
    with (site / "bots_limits.py").open("a") as file:
        file.write("del BotRun.result_of_halt\n")
    start()
    with pytest.raises(otel_limits.MaxTurnsReachedException) as raised:
        run_bot()
    assert raised.value.stop is not None
    assert (raised.value.stop.turns, raised.value.stop.action) == (3, "raised")


def test_agent_that_waits_for_a_person_is_interrupted(
    site: Path, start: Any, events: list[Event]
) -> None:
    """Also if the framework has no words for its ends: it has not answered."""
    install(site)
    with (site / "bots_limits.py").open("a") as file:
        file.write("del BotRun.reason_of\n")
    asking = Settings(policy=Policy(limits=Limits(max_turns=3), action="ask"))
    start().start(asking, [events.append])
    run_bot()
    assert [each.reason for each in events if isinstance(each, Stop)] == ["interrupt"]


def test_framework_that_cannot_wait_for_a_person_is_halted(site: Path, start: Any) -> None:
    """With the action `ask`, too."""
    install(site)
    with (site / "bots_limits.py").open("a") as file:
        file.write("del BotRun.result_of_question\n")
    runtime = start()
    runtime.start(Settings(policy=Policy(limits=Limits(max_turns=3), action="ask")))
    assert run_bot() == LIMITED


def test_binding_is_undone_when_otel_limits_is_disabled(site: Path, start: Any) -> None:
    """And done again."""
    install(site)
    runtime = start()
    assert run_bot() == LIMITED
    runtime.stop()
    assert run_bot() == UNLIMITED
    runtime.start(Settings(policy=Policy(limits=Limits(max_turns=3))))
    assert run_bot() == LIMITED


MARKERS: Final = {
    "raises": "1 / 0",
    "another type": "3",
    "another mapping": "{'a': 1}",
}


@pytest.mark.parametrize("marker", MARKERS.values(), ids=MARKERS)
def test_wrong_marker_never_reaches_the_application(site: Path, start: Any, marker: str) -> None:
    """`stop_of` looks at any result with every framework."""
    install(site)
    with (site / "bots_limits.py").open("a") as file:
        file.write(f"BotFramework.marker_of = lambda self, result: {marker}\n")
    know(installed_entry_points().entry_points)
    known.FRAMEWORKS[-1].host = start()
    known.FRAMEWORKS[-1].gaps()
    assert otel_limits.stop_of({"role": "assistant"}) is None
    assert not otel_limits.is_synthetic({"role": "assistant"})


def test_release_without_the_module_is_reported(
    site: Path, start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The import of the module that the binding waits for would never be seen."""
    install(site, "[otel_limits.frameworks]\nbots.engine = bots_limits:BOTS\n")
    start()
    run_bot()
    assert "waits for a module that bots does not have" in caplog.text


def test_binding_that_was_uninstalled_is_said_to_be_handed_over(
    site: Path,
    request: pytest.FixtureRequest,
    drop_new_finders: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It cannot be corrected, but the list of autoload can be renewed."""
    third_party.install_framework(site)
    handed = entry_points_of("bots=bots_limits:BOTS@bots-limits@bots")
    runtime = Runtime(LIVE, [ThirdPartyFramework(each) for each in handed])
    request.addfinalizer(runtime.stop)
    request.addfinalizer(drop_new_finders)
    runtime.start(Settings(policy=Policy(limits=Limits(max_turns=3))))
    assert run_bot() == UNLIMITED
    assert (
        "bots-limits: autoload or a parent process has handed over its entry point "
        "'bots = bots_limits:BOTS', but it is not installed here, so agents of bots are not "
        "limited. Install bots-limits, or run `otel-limits autoload install` again."
    ) in caplog.text


def test_enable_reports_malformed_entry_points_once(
    site: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the limits of all others hold."""
    write_metadata(site, "wrong", entry_points="[otel_limits.frameworks]\nbots\n")
    write_metadata(site, "twice", entry_points="[otel_limits.frameworks]\nstrands = a:b\n")
    for _ in range(2):
        otel_limits.enable(max_turns=3, children=False)
    otel_limits.disable()
    assert caplog.text.count("limits are not enforced: wrong: its entry point 'bots'") == 1
    assert caplog.text.count("twice: its entry point 'strands = a:b' is not used") == 1
    assert {each.levelno for each in caplog.records if "twice" in each.message} == {logging.WARNING}


# --- commands -------------------------------------------------------------------------------------


def test_check_reports_what_an_entry_point_lacks(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read from its code; nothing of it is imported."""
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "3")
    install(site, "[otel_limits.frameworks]\nbots = bots_limits:ROBOTS\nwrong\n")
    assert main(["check"]) == 1
    lines = [each for each in capsys.readouterr().err.splitlines() if "bots-limits" in each]
    assert lines == [
        (
            "otel-limits: Limits cannot be enforced: bots-limits: its entry point 'wrong' in "
            "otel_limits.frameworks is not of the form 'module = binding:OBJECT'. Correct it, or "
            "uninstall the distribution."
        ),
        (
            "otel-limits: Limits cannot be enforced: bots-limits: its entry point "
            "'bots = bots_limits:ROBOTS' names an object that does not exist, so agents of bots "
            "are not limited. Correct, upgrade or uninstall bots-limits."
        ),
    ]
    assert "bots" not in sys.modules


def test_check_reports_an_entry_point_whose_framework_is_not_installed(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name may be misspelled."""
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "3")
    install(site, "[otel_limits.frameworks]\nbotz = bots_limits:BOTS\n")
    assert main(["check"]) == 0
    assert (
        "otel-limits: bots-limits: its entry point 'botz = bots_limits:BOTS' waits for botz, which "
        "is not installed. Install it, correct the entry point, or uninstall bots-limits.\n"
    ) in capsys.readouterr().err


def test_framework_that_is_not_installed_is_no_supported_framework(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although its binding is, and knows no other distribution."""
    install(site, "[otel_limits.frameworks]\nbotz = bots_limits:BOTS\n")
    (absent,) = (ThirdPartyFramework(each) for each in installed_entry_points().entry_points)
    monkeypatch.setattr(known, "FRAMEWORKS", [absent])
    monkeypatch.setattr("otel_limits.bindings.known.FRAMEWORKS", [absent])
    assert installed_frameworks() == []


def test_check_leaves_a_binding_that_raises_to_its_probe(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it imports no framework, it cannot know, and says so."""
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "3")
    install(site)
    with (site / "bots_limits.py").open("a") as file:
        file.write("raise RuntimeError('broken')\n")
    assert main(["check"]) == 0
    read = capsys.readouterr()
    (row,) = [each for each in read.out.splitlines() if each.startswith("bots")]
    assert row.split() == ["bots", "bots", "1.5", "not", "probed"]
    later = (
        "Frameworks are probed when a program imports them; otel-limits check --probe probes now."
    )
    assert later in read.out.splitlines()
    assert "bots" not in read.err
    assert main(["check", "--probe"]) == 1
    probed = capsys.readouterr()
    assert "bots-limits: its entry point 'bots = bots_limits:BOTS' failed in import" in probed.err
    assert later not in probed.out


def test_run_refuses_malformed_entry_points_under_strict(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does with everything that it cannot limit."""
    monkeypatch.setenv("OTEL_LIMITS_STRICT", "true")
    write_metadata(site, "wrong", entry_points="[otel_limits.frameworks]\nbots\n")
    assert main(["run", "--max-turns", "3", "--", "no-such-program"]) == 2
    assert "wrong: its entry point 'bots'" in capsys.readouterr().err


@pytest.mark.parametrize("code", ["", "raise ValueError"], ids=["usable", "broken"])
def test_audit_counts_answers_of_the_framework_as_successes(site: Path, code: str) -> None:
    """`audit suggest` looks at invocations that ended by themselves."""
    install(site)
    with (site / "bots_limits.py").open("a") as file:
        file.write(code)
    known.successes.cache_clear()
    assert ("done" in known.successes()) is (not code)
    assert "end_turn" in known.successes()
    known.successes.cache_clear()


# --- what no Python has to look for ---------------------------------------------------------------


def test_startup_waits_for_the_modules_that_it_was_handed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without reading any metadata."""
    startup = otel_limits_startup
    monkeypatch.setattr(startup, "FRAMEWORKS", dict(startup.FRAMEWORKS))
    monkeypatch.setattr(startup, "PACKAGES", set(startup.PACKAGES))
    monkeypatch.setattr(startup.FINDER, "is_done", True)
    monkeypatch.setattr(startup.FINDER, "end", lambda *_: None)
    handed = Installed(entry_points_of("bots.engine=b:B@x@y strands.agent.agent=b:B@x@y")).text
    monkeypatch.setenv(startup.HANDED, handed)
    startup.wait("run")
    assert startup.FRAMEWORKS["bots.engine"] == ""
    assert "bots" in startup.PACKAGES
    assert startup.FRAMEWORKS["strands.agent.agent"] == "strands-agents"


def test_autoload_adds_to_the_frameworks_that_a_parent_has_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The parent may be a program of another environment."""
    startup = otel_limits_startup
    monkeypatch.setattr(startup, "FOUND", "bots=b:B@x@y")
    monkeypatch.setattr(startup, "wait", lambda _: None)
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "3")
    monkeypatch.setenv(startup.HANDED, "others=b:B@x@y bots=b:B@x@y")
    for _ in range(2):
        startup.autoload()
        assert os.environ[startup.HANDED] == "bots=b:B@x@y others=b:B@x@y"


def test_names_of_startup_are_those_of_the_settings() -> None:
    """Written twice, since the file must work where otel-limits cannot be imported."""
    assert otel_limits_startup.HANDED == children.HANDED
    assert not otel_limits_startup.FOUND


def test_every_module_of_a_distribution_is_written_from_its_source() -> None:
    """The page shows the same source."""
    assert "tests" not in third_party.binding()
    assert {"strands", "langchain"} <= {each.name for each in OURS}
