"""Only bindings depend on a framework: a second one is limited by the same runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import REGISTRY

import otel_limits
from otel_limits import Cycle, Event, Halt, Limits, ModelCall, Started, Stop, Turn
from otel_limits.bindings import known
from otel_limits.core.policy import Policy
from otel_limits.ledger.address import parse
from otel_limits.runs.registry import LIVE
from otel_limits.runtime.runtime import Runtime
from otel_limits.settings.policy.file import PolicyFile
from otel_limits.settings.table import Settings
from tests.second_framework import Bot, BotFramework

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(otel_limits.__file__).parent


def install(path: Path, name: str, *, editable: bool = False, place: Path = ROOT.parent) -> None:
    """Write the metadata of a distribution: next to its modules, or of a source tree `place`."""
    metadata = path / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    if editable:
        origin = {"url": place.as_uri(), "dir_info": {"editable": True}}
        (metadata / "direct_url.json").write_text(json.dumps(origin))


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> BotFramework:
    """The second framework, installed, and registered with the readers of halt markers."""
    install(tmp_path, "bots", editable=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    framework = BotFramework()
    frameworks = (*known.FRAMEWORKS, framework)
    monkeypatch.setattr(known, "FRAMEWORKS", frameworks)
    return framework


@pytest.fixture
def runtime(framework: BotFramework) -> Iterator[Runtime]:
    """A runtime of that framework alone."""
    runtime = Runtime(LIVE, (framework,))
    yield runtime
    runtime.stop()


def settings(path: Path, limits: Limits) -> Settings:
    """Limits and a ledger."""
    ledger = parse("ledger", str(path), path.parent)
    return Settings(policy=Policy(limits=limits), ledger=ledger)


def test_second_framework_is_limited(runtime: Runtime, events: list[Event], tmp_path: Path) -> None:
    """Turns, tokens, a halt, events, metrics and a ledger row work as with Strands."""
    path = tmp_path / "ledger.db"
    runtime.start(settings(path, Limits(max_turns=3)), [events.append])
    bot = Bot("bob", ask=lambda step: (f"thought {step}", 10, 5))

    ending = bot.run()

    assert [each["text"] for each in bot.said[:-1]] == ["thought 0", "thought 1", "thought 2"]
    stop = otel_limits.stop_of(ending)
    assert stop is not None
    assert (stop.reason, stop.turns, stop.usage.total, stop.cycles) == ("max_turns", 3, 45, 4)
    assert otel_limits.is_synthetic(ending["message"])
    kinds = [type(event) for event in events]
    assert [kinds.count(each) for each in (Started, Cycle, ModelCall, Turn, Halt, Stop)] == [
        1,
        4,
        3,
        3,
        1,
        1,
    ]
    assert value("stops_total", reason="max_turns", action="halted") == 1
    assert value("turns_total") == 3
    assert value("tokens_total", model="bot-model", type="input") == 30
    runtime.stop()
    assert rows_of(path) == [("bob", "max_turns", 3, 30, 15)]


def test_natural_end_keeps_framework_stop_reason(runtime: Runtime, tmp_path: Path) -> None:
    """The stop reason of the framework passes through, in the metrics as well."""
    runtime.start(settings(tmp_path / "ledger.db", Limits(max_turns=3)))
    assert Bot("bob", ask=lambda _: ("done", 10, 5)).run()["reason"] == "done"
    assert value("stops_total", reason="done", action="none") == 1


def test_token_budget_limits_second_framework(runtime: Runtime, tmp_path: Path) -> None:
    """Limits on tokens and on turns use the same counts."""
    runtime.start(settings(tmp_path / "ledger.db", Limits(max_token_budget=30)))
    bot = Bot("bob", ask=lambda _: ("on and on", 10, 5))
    assert bot.run()["reason"] == "max_token_budget"
    assert len(bot.said) == 3


def test_quota_limits_second_framework(runtime: Runtime, tmp_path: Path) -> None:
    """A binding that uses the shared path cannot forget quotas."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("quotas: {calls: {model_calls: 2, window: P1D}}")
    runtime.start(settings(tmp_path / "ledger.db", Limits()), policy_file=PolicyFile(str(policy)))
    bot = Bot("bob", ask=lambda _: ("on and on", 10, 5))
    assert bot.run()["reason"] == "quota_exceeded"
    assert len(bot.said) == 3


def test_kill_ends_second_framework(runtime: Runtime, tmp_path: Path) -> None:
    """A kill refuses the next model call, whatever the framework."""
    runtime.start(settings(tmp_path / "ledger.db", Limits(max_turns=9)))

    def ask(step: int) -> tuple[str, int, int]:
        if step == 1:
            otel_limits.kill(agent="bob")
        return "on and on", 10, 5

    bot = Bot("bob", ask=ask)
    assert bot.run()["reason"] == "killed"
    assert len(bot.said) == 3


def value(name: str, **labels: str) -> float | None:
    """One sample of bob's metrics."""
    return REGISTRY.get_sample_value(f"otel_limits_{name}", {"agent": "bob", **labels})


def rows_of(path: Path) -> list[tuple[Any, ...]]:
    """Ledger row of each invocation."""
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(path)) as ledger:
        return ledger.execute(
            "SELECT i.agent, i.reason, count(*), sum(c.input_tokens), sum(c.output_tokens)"
            " FROM otel_limits_invocations i JOIN otel_limits_model_calls c"
            " ON c.invocation_id = i.id GROUP BY 1, 2"
        ).fetchall()


STRANDS_WORDS = re.compile(
    r"strands\.telemetry|execute_event_loop_cycle|^\s*(import|from) strands|limit_turns",
    re.MULTILINE,
)


def test_strands_is_used_by_its_binding_only() -> None:
    """Not its modules, span names or stop reasons; the demo may, as a program that uses it."""
    known_in = {
        path.relative_to(ROOT).parts[:2]
        for path in ROOT.rglob("*.py")
        if STRANDS_WORDS.search(path.read_text(encoding="utf-8"))
    }
    assert {place for place in known_in if place[0] != "demo"} == {("bindings", "strands")}
