"""Real programs that are limited from outside: by each of the three ways that need no code."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING
from urllib.request import urlopen

import pytest
from opentelemetry.sdk.trace import TracerProvider

import otel_limits
from otel_limits.bindings import recognition
from otel_limits.bindings.entry_points import Installed
from otel_limits.bindings.known import FRAMEWORKS
from otel_limits.cli.run_command import isolation_problem
from otel_limits.otel.export import tracer_provider
from otel_limits.settings.children import RUN as RUN_BY
from otel_limits.settings.children import environment_for_run
from otel_limits.startup import otel_limits_startup
from tests.launching import (
    ENDLESS,
    INSTRUMENT,
    NO_EXPORT,
    RUN,
    SELECTED,
    Ended,
    execute,
    execute_in,
    fresh_environment,
)
from tests.processes import bounded, free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


WAYS = {
    "run": (RUN, {"OTEL_LIMITS_LEDGER": "none"}),
    "instrument": (INSTRUMENT, NO_EXPORT),
    "tracer provider": ((), SELECTED),
}
"""Command in front of the program, and variables that it needs."""


@contextlib.contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command that is spoken with."""
    with (
        subprocess.Popen(
            command,
            env=fresh_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
        bounded(process),
    ):
        yield process


# --- the same limit, three ways -------------------------------------------------------------------


@pytest.fixture(scope="module", params=list(WAYS))
def limited(request: pytest.FixtureRequest) -> Ended:
    """An endless agent with max_turns=3, limited each of the ways."""
    front, variables = WAYS[request.param]
    return execute(*front, sys.executable, ENDLESS, OTEL_LIMITS_MAX_TURNS="3", **variables)


def test_an_endless_agent_stops_after_exactly_that_many_model_calls(limited: Ended) -> None:
    """The cap holds exactly, with the honest stop reason."""
    assert (limited.events["stop_reason"], limited.events["model_calls"]) == ("max_turns", 3)


def test_nothing_is_counted_twice(limited: Ended) -> None:
    """Three model calls are three turns in the metrics, and one stop."""
    samples = limited.events["samples"]
    assert samples["otel_limits_turns_total endless"] == 3
    assert samples["otel_limits_stops_total endless max_turns halted"] == 1


def test_spans_are_followed(limited: Ended) -> None:
    """There is an SDK provider, and the agent's span reached the processor."""
    assert limited.events["provider"] in {"TracerProvider", "FallbackProvider"}
    assert "otel_limits_unsampled_invocations_total endless" not in limited.events["samples"]


def test_log_contains_only_the_halt_once(limited: Ended) -> None:
    """One line from otel-limits."""
    assert [line.split(":")[0] for line in limited.ours] == [
        "Agent 'endless' was halted by max_turns"
    ]


# --- otel-limits run ------------------------------------------------------------------------------


def test_options_win_over_the_environment() -> None:
    """--max-turns replaces OTEL_LIMITS_MAX_TURNS, even an invalid one, and a halt names it."""
    ended = execute(
        *(*RUN, "--max-turns", "3", "--", sys.executable, ENDLESS), OTEL_LIMITS_MAX_TURNS="abc"
    )
    assert ended.events["model_calls"] == 3
    assert "The limit is set in otel-limits run --max-turns." in ended.log


def test_child_process_names_option_unless_program_changes_it() -> None:
    """A child inherits options; a variable that the program sets for it is a variable."""
    programs = (
        [sys.executable, ENDLESS],
        ["env", "OTEL_LIMITS_MAX_TURNS=2", sys.executable, ENDLESS],
    )
    program = f"import subprocess\nfor each in {programs!r}: subprocess.run(each)"
    ended = execute(*RUN, "--max-turns", "3", "--", sys.executable, "-c", program)
    assert re.findall(r"The limit is set in (.*?)\.", ended.log) == [
        "otel-limits run --max-turns",
        "OTEL_LIMITS_MAX_TURNS",
    ]


def test_switches_reach_the_program_as_opentelemetry_spells_them() -> None:
    """--strict is `true`, --no-disabled is `false`."""
    program = (
        "import os; print(os.environ['OTEL_LIMITS_STRICT'], os.environ['OTEL_LIMITS_DISABLED'])"
    )
    ended = execute(
        *RUN,
        "--strict",
        "--no-disabled",
        sys.executable,
        "-c",
        program,
        OTEL_LIMITS_DISABLED="true",
    )
    assert ended.output == "true false\n"


def test_all_mistakes_are_reported_before_the_program_starts(tmp_path: Path) -> None:
    """Options by the names that were typed, variables by theirs; the program never runs."""
    ran = tmp_path / "ran"
    ended = execute(
        *(*RUN, "--max-turns", "0", "--", sys.executable, "-c", f"open({str(ran)!r}, 'w')"),
        OTEL_LIMITS_ACTION="explode",
        OTEL_LIMITS_MAXTURNS="3",
    )
    assert (ended.status, ran.exists()) == (2, False)
    assert [line.split()[1] for line in ended.log.splitlines()] == [
        "--max-turns",
        "OTEL_LIMITS_ACTION",
        "OTEL_LIMITS_MAXTURNS",
    ]


def test_an_option_that_does_not_exist_is_refused() -> None:
    """A typing error is no limit."""
    ended = execute(*RUN, "--max-turn", "3", "--", sys.executable, "-c", "")
    assert ended.status == 2
    assert "--max-turn" in ended.log


def test_no_program_is_a_mistake() -> None:
    """There is something to try instead."""
    ended = execute(*RUN, "--max-turns", "3")
    assert ended.status == 2
    assert "No program given. Try: otel-limits run -- python app.py" in ended.log


def test_a_command_that_is_not_found_has_the_status_that_shells_give_it() -> None:
    """127, and a sentence."""
    ended = execute(*RUN, "--", "no-such-program")
    assert (ended.status, ended.log) == (127, "otel-limits: no-such-program: command not found.\n")
    script = execute(*RUN, "--", "bounded.py")
    assert script.log.endswith("bounded.py: command not found. Did you mean: python bounded.py?\n")


def test_a_command_that_cannot_be_executed_has_the_status_that_shells_give_it(
    tmp_path: Path,
) -> None:
    """126, and a sentence with the reason."""
    program = tmp_path / "program"
    program.write_text("")
    ended = execute(*RUN, "--", str(program))
    assert ended.status == 126
    assert ended.log == f"otel-limits: Cannot start {program}: Permission denied.\n"


@pytest.mark.parametrize("option", ["-I", "-E", "-S", "-sE", "-WignoreI -I"])
def test_a_python_that_would_not_load_us_is_not_started(option: str) -> None:
    """Isolated modes ignore PYTHONPATH: the program would run without limits."""
    ended = execute(*RUN, "--", sys.executable, *option.split(), "-c", "print('ran')")
    assert (ended.status, ended.output) == (2, "")
    assert "would ignore all limits. Start it without -" in ended.log


@pytest.mark.parametrize(
    "arguments", [("-c", "print('ran')", "-E"), ("-Wdefault", "-c", "print('ran')")]
)
def test_arguments_of_the_program_are_its_own(arguments: tuple[str, ...]) -> None:
    """A program's argument that looks like an option of Python is left alone."""
    assert execute(*RUN, "--", sys.executable, *arguments).output == "ran\n"


def test_arguments_are_passed_on_untouched() -> None:
    """Also those that look like ours, and a second double dash."""
    program = "import sys; print(sys.argv[1:])"
    words = ("--", "--max-turns", "0", "a b", "--help")
    ended = execute(*RUN, "--", sys.executable, "-c", program, *words, OTEL_LIMITS_QUIET="false")
    assert ended.output == "['--', '--max-turns', '0', 'a b', '--help']\n"
    assert "--max-turns after the program is passed to the program" in ended.log


def test_the_exit_status_is_that_of_the_program() -> None:
    """There is no wrapper in between."""
    assert execute(*RUN, "--", sys.executable, "-c", "raise SystemExit(7)").status == 7


def test_signals_reach_the_program() -> None:
    """The program is the very process that was started, and dies of the signal itself."""
    program = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
    with started(*RUN, "--", sys.executable, "-c", program) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM


def test_sigusr2_ends_what_is_live() -> None:
    """The signal ends the invocation with `killed`, and the program continues."""
    with started(*RUN, "--", sys.executable, ENDLESS, "--wait") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGUSR2)
        last = process.stdout.read().splitlines()[-1]
        assert process.wait() == 0
    assert json.loads(last)["stop_reason"] == "killed"


def test_a_provider_that_the_program_sets_before_the_first_call_wins() -> None:
    """Even after the agent was made: no warning of OpenTelemetry, and the cap holds by spans."""
    ended = execute(*RUN, "--max-turns", "3", "--", sys.executable, ENDLESS, "--late-provider")
    assert (ended.events["model_calls"], "Overriding" in ended.log) == (3, False)
    assert "otel_limits_unsampled_invocations_total endless" not in ended.events["samples"]


def test_it_goes_together_with_opentelemetry_instrument() -> None:
    """Calls are counted once; the preset and the halt are logged once."""
    ended = execute(
        *(*RUN, "--max-turns", "3", "--preset", "recommended", "--"),
        *(*INSTRUMENT, sys.executable, ENDLESS),
        **NO_EXPORT,
    )
    assert (ended.events["stop_reason"], ended.events["model_calls"]) == ("max_turns", 3)
    assert ended.events["samples"]["otel_limits_turns_total endless"] == 3
    assert len(ended.ours) == 2


def test_python_programs_that_the_program_starts_are_limited_too() -> None:
    """They inherit the environment, and us with it."""
    program = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]], check=True)"
    ended = execute(*RUN, "--max-turns", "2", "--", sys.executable, "-c", program, ENDLESS)
    assert (ended.events["stop_reason"], ended.events["model_calls"]) == ("max_turns", 2)


def test_a_program_may_import_strands_before_everything_else() -> None:
    """Most do; otel-limits is loaded during that import."""
    program = "import strands, runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
    ended = execute(*RUN, "--max-turns", "2", "--", sys.executable, "-c", program, ENDLESS)
    assert (ended.events["stop_reason"], ended.events["model_calls"]) == ("max_turns", 2)


def test_agents_are_not_touched_while_their_module_is_being_imported(tmp_path: Path) -> None:
    """A Strands that imports the SDK half-way through is switched on at its end."""
    (tmp_path / "strands" / "agent").mkdir(parents=True)
    (tmp_path / "strands" / "__init__.py").write_text("")
    (tmp_path / "strands" / "agent" / "__init__.py").write_text("")
    (tmp_path / "strands" / "agent" / "agent.py").write_text(
        "import opentelemetry.sdk.trace\n"
        "class Agent:\n"
        "    def _start_agent_trace_span(self): pass\n"
        "    def _end_agent_trace_span(self): pass\n"
        "    def structured_output_async(self): pass\n"
    )
    (tmp_path / "strands_agents-1.62.0.dist-info").mkdir()
    # Not in the middle, where even less of it could have been found.
    program = (
        "import strands.agent.agent; from otel_limits.runtime.runtime import RUNTIME; "
        "print(RUNTIME.enforcement().source)"
    )
    ended = execute(*RUN, "--", sys.executable, "-c", program, PYTHONPATH=str(tmp_path))
    assert ended.output == "run\n"
    assert "Agent.add_hook" in ended.log
    assert "Agent._start_agent_trace_span" not in ended.log


@pytest.mark.parametrize("wish", ["enable", "disable"])
def test_the_import_leaves_garbage_collection_as_the_program_set_it(wish: str) -> None:
    """It is off while otel-limits is imported, because a full collection takes as long as that."""
    program = f"import gc; gc.{wish}(); import strands.agent.agent; print(gc.isenabled())"
    ended = execute(*RUN, "--max-turns", "2", "--", sys.executable, "-c", program)
    assert ended.output == f"{wish == 'enable'}\n"


def test_a_program_without_agents_loads_nothing_of_us() -> None:
    """Waiting costs no import, and leaves the path as it was."""
    program = (
        "import sys; print('otel_limits' in sys.modules, any('otel_limits' in p for p in sys.path))"
    )
    assert execute(*RUN, "--", sys.executable, "-c", program).output == "False False\n"


# --- sitecustomize --------------------------------------------------------------------------------


def test_a_sitecustomize_further_down_the_path_still_runs(tmp_path: Path) -> None:
    """It is the one that the program sees; the command is a Python as well, and runs it, too."""
    (tmp_path / "sitecustomize.py").write_text("print('theirs')\n")
    program = "import sitecustomize; print(sitecustomize.__file__)"
    ended = execute(*RUN, "--", sys.executable, "-c", program, PYTHONPATH=str(tmp_path))
    assert ended.output == f"theirs\ntheirs\n{tmp_path / 'sitecustomize.py'}\n"


@pytest.mark.parametrize("fault", ["1 / 0", "import no_such_module"])
def test_a_sitecustomize_that_fails_fails_as_it_does_without_us(tmp_path: Path, fault: str) -> None:
    """Python reports it and continues: once for the command, once for the program."""
    (tmp_path / "sitecustomize.py").write_text(fault)
    with_us = execute(*RUN, "--", sys.executable, "-c", "print(1)", PYTHONPATH=str(tmp_path))
    without = execute(sys.executable, "-c", "print(1)", PYTHONPATH=str(tmp_path))
    assert "sitecustomize" in without.log
    assert with_us == Ended(0, without.output, without.log * 2)


PYTHONS = (
    sys.executable,
    *sorted(map(str, Path("~/.pyenv/versions").expanduser().glob("3.*/bin/python"))),
)
"""This Python, and the others of this machine."""


@pytest.fixture
def foreign(tmp_path: Path) -> dict[str, str]:
    """Environment of a program whose Python can import Strands, but not otel-limits."""
    (tmp_path / "strands" / "agent").mkdir(parents=True)
    for module in ("strands/__init__.py", "strands/agent/__init__.py", "strands/agent/agent.py"):
        (tmp_path / module).write_text("")
    info = tmp_path / "strands_agents-1.62.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strands-agents\nVersion: 1.62.0\n")
    (tmp_path / "otel_limits.py").write_text("raise ImportError('it is not here')")
    (tmp_path / "sitecustomize.py").write_text("print('theirs')")
    return {**environment_for_run({"PYTHONPATH": str(tmp_path)}), RUN_BY: "another"}


IMPORTS = "import strands.agent.agent; print('ran')"


@pytest.mark.parametrize("python", PYTHONS)
def test_python_without_otel_limits_warns_about_missing_limits(
    foreign: dict[str, str], python: str
) -> None:
    """The program continues, but not silently."""
    ended = execute(python, "-c", IMPORTS, **foreign)
    assert (ended.status, ended.output) == (0, "theirs\nran\n")
    assert "Install otel-limits there." in ended.log
    assert ended.log.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "because"),
    [
        ("raise NameError('x')", "NameError: x"),
        ("a = = 1", "SyntaxError: invalid syntax"),
        ("from token import nothing", "ImportError: cannot import name 'nothing' from 'token'"),
    ],
)
def test_file_that_hides_a_module_is_named(tmp_path: Path, text: str, because: str) -> None:
    """The directory of a program is the first on Python's path, also for otel-limits."""
    hiding = tmp_path / "difflib.py"
    hiding.write_text(text)
    ended = execute_in(tmp_path, *RUN, "--ledger", "none", "--", sys.executable, "-c", IMPORTS)
    assert ended.status == 2
    assert f" ({because}" in ended.log
    file = str(hiding) if "Error: cannot" not in because else "token.py"
    assert ended.log.partition(", in ")[2].partition(")")[0].endswith(file)
    assert ended.log.endswith(" Correct that file, or rename it if it hides another module.\n")


def test_module_that_is_missing_is_to_be_installed(tmp_path: Path) -> None:
    """E.g. after an installation without dependencies."""
    (tmp_path / "difflib.py").write_text("import nothing_there")
    ended = execute_in(tmp_path, *RUN, "--ledger", "none", "--", sys.executable, "-c", IMPORTS)
    assert " (No module named 'nothing_there'). Install otel-limits there." in ended.log


def test_run_leaves_no_file_behind(tmp_path: Path) -> None:
    """Neither behind a program, nor behind a command that starts one, e.g. of a cron job."""
    started = f"{sys.executable} {ENDLESS}; exit"
    for command in ([sys.executable, ENDLESS], ["sh", "-c", started]):
        ended = execute(
            *RUN, "--max-turns", "3", "--ledger", "none", "--", *command, TMPDIR=str(tmp_path)
        )
        assert '"max_turns"' in ended.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("launcher", [[], ["env"], ["nice"]])
def test_unused_program_is_reported_behind_a_launcher(launcher: list[str]) -> None:
    """The launcher becomes the Python, as `otel-limits run` became the launcher."""
    words = (*RUN, "--max-turns", "3", "--", *launcher, sys.executable, "-c", "")
    ended = execute(*words, OTEL_LIMITS_QUIET="false")
    assert "no agent ran in this process or in a child process" in ended.log


def test_strict_ends_a_program_with_agents_in_a_python_without_otel_limits(
    foreign: dict[str, str],
) -> None:
    """No handler of the program can keep it."""
    program = f"try:\n    {IMPORTS}\nfinally:\n    print('continued')"
    ended = execute(sys.executable, "-c", program, OTEL_LIMITS_STRICT="true", **foreign)
    assert (ended.status, ended.output) == (2, "theirs\n")
    assert ended.log.count("Install otel-limits there.") == 1


def test_disabled_python_without_otel_limits_stays_silent(foreign: dict[str, str]) -> None:
    """Missing limits are intended there."""
    ended = execute(sys.executable, "-c", IMPORTS, OTEL_LIMITS_DISABLED="true", **foreign)
    assert (ended.output, ended.log) == ("theirs\nran\n", "")


@pytest.mark.parametrize("module", ["opentelemetry.sdk.trace", "strands.agent.agent"])
def test_python_without_otel_limits_or_agents_stays_silent(
    foreign: dict[str, str], tmp_path: Path, module: str
) -> None:
    """A helper in another environment does not concern us, nor another package named strands."""
    shutil.rmtree(tmp_path / "strands_agents-1.62.0.dist-info")
    if module == "strands.agent.agent":  # only this one, in a Python without the rest
        foreign["PYTHONNOUSERSITE"] = "1"
        program = (
            f"import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]; {IMPORTS}"
        )
    else:
        program = f"import {module}; print('ran')"
    ended = execute(sys.executable, "-c", program, **foreign)
    assert (ended.output, ended.log) == ("theirs\nran\n", "")


def test_tables_of_startup_are_those_of_the_bindings() -> None:
    """Written twice, since the file must work where otel-limits cannot be imported."""
    assert otel_limits_startup.CLASSES == recognition.CLASSES
    assert {
        framework.module: framework.distribution for framework in FRAMEWORKS
    } == otel_limits_startup.FRAMEWORKS
    packages = {package for framework in FRAMEWORKS for package in framework.packages}
    assert packages == set(otel_limits_startup.PACKAGES)


# --- mistakes in settings that no command checks --------------------------------------------------


@pytest.fixture(scope="module")
def mistaken() -> Ended:
    """A program under opentelemetry-instrument with a bad setting and, as an option, a good one."""
    return execute(
        *(*INSTRUMENT, "--limits_max_iterations", "2", sys.executable, ENDLESS),
        OTEL_LIMITS_MAX_TURNS="abc",
        **NO_EXPORT,
    )


def test_a_bad_value_is_one_error_that_names_variable_and_value(mistaken: Ended) -> None:
    """It cannot end the program, which others instrument as well."""
    errors = [line for line in mistaken.ours if "halted by" not in line]
    sentence = (
        "otel-limits: OTEL_LIMITS_MAX_TURNS must be a whole number of 1 or more, got 'abc'. "
        "Unset means no limit. All other settings apply."
    )
    assert errors == [sentence]


def test_a_bad_value_is_counted(mistaken: Ended) -> None:
    """An alert can see it."""
    assert mistaken.events["samples"]["otel_limits_internal_errors_total config"] == 1


def test_beside_a_bad_value_the_others_are_enforced(mistaken: Ended) -> None:
    """Also one that is an option of opentelemetry-instrument: --limits_max_iterations."""
    assert mistaken.events["stop_reason"] == "max_iterations"
    assert mistaken.events["model_calls"] == 2


def test_beside_a_bad_value_other_instrumentors_load(mistaken: Ended) -> None:
    """An exception from otel-limits would have stopped them."""
    assert mistaken.events["threads_instrumented"] is True


@pytest.mark.parametrize("way", ["instrument", "tracer provider"])
def test_strict_ends_the_process(way: str) -> None:
    """Status 2 and the sentence, instead of a program whose limits are in doubt."""
    front, variables = WAYS[way]
    ended = execute(
        *(*front, sys.executable, ENDLESS),
        OTEL_LIMITS_MAX_TURNS="abc",
        OTEL_LIMITS_STRICT="true",
        **variables,
    )
    assert (ended.status, ended.output) == (2, "")
    assert [line.split(", got")[1] for line in ended.log.splitlines()] == [
        " 'abc'. Unset means no limit."
    ]


def test_settings_enabled_in_code_override_the_environment() -> None:
    """The provider that the environment selects comes later and leaves it alone."""
    ended = execute(*(sys.executable, ENDLESS, "--enable"), OTEL_LIMITS_MAX_TURNS="5", **SELECTED)
    assert ended.events["model_calls"] == 2


# --- exporters ------------------------------------------------------------------------------------


@pytest.fixture
def install_exporter(tmp_path: Path) -> Callable[[str], str]:
    """Put an OTLP exporter on the path: what its constructor does is given."""

    def install(constructor: str) -> str:
        package = tmp_path / "opentelemetry/exporter/otlp/proto/http"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()  # it precedes the installed one
        (package / "trace_exporter.py").write_text(
            "from opentelemetry.sdk.trace.export import ConsoleSpanExporter\n"
            "class OTLPSpanExporter(ConsoleSpanExporter):\n"
            "    def __init__(self):\n"
            f"        {constructor}\n"
        )
        return str(tmp_path)

    return install


def test_spans_are_exported_where_the_environment_asks_for_it(
    install_exporter: Callable[[str], str],
) -> None:
    """The provider that a program is given has an OTLP exporter, flushed at its end."""
    path = install_exporter("super().__init__(formatter=lambda span: f'span {span.name}\\n')")
    ended = execute(
        *(*RUN, "--max-turns", "2", "--", sys.executable, ENDLESS),
        PYTHONPATH=path,
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1",
    )
    assert ended.output.splitlines()[1:].count("span chat") == 2


@pytest.mark.usefixtures("faulty")
def test_an_exporter_that_cannot_be_made_costs_no_provider(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and agents are still followed through their spans."""

    class OTLPSpanExporter:
        def __init__(self) -> None:
            raise ValueError("no such compression")

    module = ModuleType("trace_exporter")
    vars(module)["OTLPSpanExporter"] = OTLPSpanExporter
    monkeypatch.setitem(
        sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", module
    )
    assert isinstance(tracer_provider("http/protobuf", 1.0), TracerProvider)
    assert caplog.messages == [
        "otel-limits cannot create the OTLP exporter, so no spans are exported."
    ]


# --- /metrics -------------------------------------------------------------------------------------


@pytest.fixture
def staying() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A limited program that stays after its agent was halted, and the port it serves."""
    port = free_port()
    options = ("--max-turns", "3", "--prometheus-port", str(port))
    with started(*RUN, *options, "--", sys.executable, ENDLESS, "--stay") as process:
        yield process, port


def test_metrics_are_scraped_from_the_port(staying: tuple[subprocess.Popen[str], int]) -> None:
    """Over HTTP, while the program runs."""
    process, port = staying
    assert process.stdout is not None
    process.stdout.readline()
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert 'otel_limits_stops_total{action="halted",agent="endless",reason="max_turns"} 1.0' in text


def test_a_port_that_is_taken_is_logged_and_never_fatal() -> None:
    """It is counted, and the limit still holds."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = execute(
            *(*RUN, "--max-turns", "3", "--prometheus-port", port, "--", sys.executable, ENDLESS),
        )
    assert (ended.status, ended.events["model_calls"]) == (0, 3)
    assert ended.events["samples"]["otel_limits_internal_errors_total prometheus"] == 1
    assert f"otel-limits cannot serve /metrics on 127.0.0.1 port {port}" in ended.log


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("host", ["192.0.2.1", "x" * 70 + ".invalid"])
def test_a_host_that_cannot_be_served_is_logged_and_never_fatal(
    host: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, with several frameworks; also a name that could not even be looked up."""
    for framework in FRAMEWORKS:
        importlib.import_module(framework.module)
    monkeypatch.setenv("OTEL_LIMITS_PROMETHEUS_HOST", host)
    monkeypatch.setenv("OTEL_LIMITS_PROMETHEUS_PORT", str(free_port()))
    otel_limits.enable()
    assert [f"otel-limits cannot serve /metrics on {host} port" in m for m in caplog.messages] == [
        True
    ]


def test_dead_quota_store_does_not_delay_the_start(tmp_path: Path) -> None:
    """Its outage is published while the agents' import is still enabling otel-limits."""
    policy = tmp_path / "limits.yaml"
    policy.write_text("quotas: {calls: {model_calls: 50, window: day, on_store_error: deny}}")
    store = {
        "OTEL_LIMITS_POLICY": str(policy),
        "OTEL_LIMITS_QUOTA_STORE": f"redis://127.0.0.1:{free_port()}",
    }
    program = "import strands; print('over')"
    began = time.monotonic()
    ended = execute(*RUN, "--", sys.executable, "-c", program, **store)
    assert time.monotonic() - began < otel_limits_startup.LONGEST_WAIT_SECONDS
    assert (ended.status, ended.output) == (0, "over\n")
    assert "otel-limits: quota store unavailable" in ended.log


def test_a_supervisor_without_agents_leaves_the_port_to_its_worker() -> None:
    """It imports the SDK, which is enough to switch on, and starts the program with the agent."""
    port = free_port()
    supervisor = (
        "import opentelemetry.sdk.trace, socket, subprocess, sys\n"
        "subprocess.run([sys.executable, *sys.argv[1:]], check=True)"
    )
    ended = execute(
        *(*RUN, "--max-turns", "3", "--prometheus-port", str(port), "--"),
        *(sys.executable, "-c", supervisor, ENDLESS),
    )
    assert ended.events["model_calls"] == 3
    assert "cannot serve" not in ended.log


def test_metrics_that_cannot_be_made_cost_no_limit(tmp_path: Path) -> None:
    """The multi-process directory of prometheus_client is not there."""
    ended = execute(
        *(*RUN, "--max-turns", "3", "--", sys.executable, ENDLESS),
        PROMETHEUS_MULTIPROC_DIR=str(tmp_path / "missing"),
    )
    assert (ended.events["stop_reason"], ended.events["model_calls"]) == ("max_turns", 3)
    assert "otel-limits cannot use prometheus_client" in ended.log


# --- the Python of a command ----------------------------------------------------------------------

PROGRAM = "print('ran')"


@pytest.fixture
def script(tmp_path: Path) -> str:
    """Return the path of an executable whose first line a test writes."""
    path = tmp_path / "app"
    path.touch()
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def pex(tmp_path: Path) -> Path:
    """Return a PEX, as far as it differs from another zip file with a first line."""
    path = tmp_path / "app.pex"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("PEX-INFO", "{}")
        archive.writestr("__main__.py", PROGRAM)
    path.write_bytes(b"#!/usr/bin/env python3\n" + path.read_bytes())
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("options", "obstacle"),
    [
        ("", None),
        ("-X dev -W error::SyntaxWarning", None),
        ("-i", None),
        ("--version", None),
        ("-I", "-I"),
        ("-sE", "-E"),
        ("-S", "-S"),
        ("-I -S", "-S"),
        ("-X dev -I", "-I"),
        ("-Wignore -I", "-I"),
    ],
)
def test_python_is_asked_with_its_options(options: str, obstacle: str | None) -> None:
    """It knows best which of them keep it from loading otel-limits, and names the most severe."""
    environ = environment_for_run({"PATH": os.environ["PATH"]})
    problem = isolation_problem([sys.executable, *options.split(), "app.py"], environ, Installed())
    expected = f"{sys.executable} {obstacle} would ignore all limits. Start it without {obstacle}"
    assert (problem or "").startswith(expected if obstacle else "")
    assert (problem is None) is (obstacle is None)


def test_python_that_cannot_be_asked_is_started(script: str) -> None:
    """Its fault shows there."""
    python = Path(script).with_name("python3")
    Path(script).rename(python)
    python.write_text(f"#!{python}\n")
    assert isolation_problem([str(python)], {"PATH": ""}, Installed()) is None


@pytest.mark.parametrize(
    ("first_line", "refused"),
    [
        (f"#!{sys.executable} -I", "-I would ignore all limits"),
        ("#!/usr/bin/env -S python3 -sE", "-E would ignore all limits"),
        ("#!/usr/bin/env -S PYTHONPATH=/app python3", "would ignore PYTHONPATH"),
        (f"#!/usr/bin/env -S -i {sys.executable}", "would ignore PYTHONPATH"),
        (f"#!{sys.executable}", ""),
        ("#!/usr/bin/env python3", ""),
    ],
)
def test_the_first_line_of_a_script_is_asked(script: str, first_line: str, refused: str) -> None:
    """It names the interpreter and its options; nothing is printed by the script."""
    Path(script).write_text(f"{first_line}\n{PROGRAM}\n")
    ended = execute(*RUN, "--", script)
    assert (ended.status, ended.output) == ((2, "") if refused else (0, "ran\n"))
    assert refused in ended.log


@pytest.mark.parametrize("front", [(), (sys.executable,), (sys.executable, "-u")])
def test_a_pex_is_refused_with_the_way_that_works(pex: Path, front: tuple[str, ...]) -> None:
    """However it is started: its Python would run without any limit."""
    ended = execute(*RUN, "--", *front, str(pex))
    assert (ended.status, ended.output) == (2, "")
    assert "is a PEX" in ended.log
    assert "call otel_limits.enable() in its code" in ended.log


def test_another_zip_file_is_not_a_pex(tmp_path: Path) -> None:
    """A zipapp has no bootstrap that isolates it."""
    path = tmp_path / "app.pyz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("__main__.py", PROGRAM)
    ended = execute(*RUN, "--", sys.executable, str(path))
    assert (ended.status, ended.output) == (0, "ran\n")


# --- other programs -------------------------------------------------------------------------------

NOTICE = "{} is not a Python program. Limits apply in the Python processes that it starts"


@pytest.mark.parametrize("front", [("env", "A=1"), ("nice", "-n", "0"), ("sh", "-c", '"$@"', "sh")])
def test_other_program_is_started_after_a_notice(front: tuple[str, ...]) -> None:
    """One line, with the command that verifies limits; QUIET and DISABLED suppress it."""
    command = (*RUN, "--", *front, sys.executable, "-c", PROGRAM)
    noted = execute(*command, OTEL_LIMITS_QUIET="false")
    first = noted.log.splitlines()[0]
    assert (noted.status, noted.output) == (0, "ran\n")
    assert first.startswith(f"otel-limits: {NOTICE.format(front[0])}")
    assert first.endswith("otel-limits doctor -- otel-limits run -- THE PYTHON IT ENDS IN")
    for variable in ("OTEL_LIMITS_QUIET", "OTEL_LIMITS_DISABLED"):
        silent = execute(*command, **{"OTEL_LIMITS_QUIET": "false", variable: "true"})
        assert (silent.output, silent.log) == ("ran\n", "")


def test_strict_refuses_other_programs() -> None:
    """It promises that no agent runs without limits, which cannot be seen here."""
    command = ("nice", sys.executable, "-c", PROGRAM)
    refused = execute(*RUN, "--strict", "--", *command)
    assert (refused.status, refused.output) == (2, "")
    assert "nice is not a Python program, so limits may not apply" in refused.log
    assert "Start that Python with otel-limits run" in refused.log
    inside = execute("nice", *RUN, "--strict", "--", *command[1:])
    assert (inside.status, inside.output) == (0, "ran\n")
    disabled = execute(*RUN, "--strict", "--", *command, OTEL_LIMITS_DISABLED="true")
    assert disabled.output == "ran\n"


def test_notice_does_not_show_arguments(script: str) -> None:
    """A name may be a URL by mistake, and arguments contain secrets."""
    Path(script).write_text("#!/bin/sh\n")
    noted = execute(*RUN, "--", script, "--password=s3cret", OTEL_LIMITS_QUIET="false")
    assert "s3cret" not in noted.log
