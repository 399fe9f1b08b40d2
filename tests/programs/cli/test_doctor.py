"""`otel-limits doctor` as a program: a runaway under real launchers, which leaves no files."""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from otel_limits.bindings.known import FRAMEWORKS
from otel_limits.cli.doctor.launcher import UnknownLauncherError, read_launcher
from tests.launching import (
    BIN,
    INSTRUMENT,
    NO_EXPORT,
    RUN,
    SELECTED,
    WITHOUT_EXPORTER,
    execute,
    execute_in,
)
from tests.paths import ROOT
from tests.processes import SOON
from tests.programs.runtime.test_autoload import Environment
from tests.unit.cli.test_doctor import DOCTOR, PROGRAM, PYTHON, examined, findings

SELECTING = ("env", *(f"{name}={value}" for name, value in SELECTED.items()))


@pytest.fixture(scope="module")
def python(only_strands: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with Strands alone."""
    made = Environment(tmp_path_factory.mktemp("environment"))
    made.leave(ROOT, only_strands)
    return made.python


# --- launchers ------------------------------------------------------------------------------------

HALTED = ("ok", "Halted after 3 of 3 turns.")


@pytest.mark.parametrize(
    ("launcher", "way"),
    [
        (RUN, "otel-limits run."),
        (INSTRUMENT, "opentelemetry-instrument."),
        ((*RUN, "--", *INSTRUMENT), "otel-limits run."),
        (SELECTING, "OTEL_PYTHON_TRACER_PROVIDER"),
    ],
    ids=["run", "instrument", "both", "tracer provider"],
)
def test_a_launcher_under_which_limits_hold_is_proven(
    launcher: tuple[str, ...], way: str, python: str
) -> None:
    """Halted at three, by whom, and how it is followed."""
    status, found = examined(*launcher, python, **NO_EXPORT)
    assert found["runaway"][1].startswith("Halted after 3 of 3 turns")
    assert found["thread pool"] == found["child"] == HALTED
    assert found["enabled by"][1].startswith(way)
    assert found["spans"] == ("ok", "Received.")
    assert found["provider"][1] in {
        "opentelemetry.sdk.trace.TracerProvider.",
        "otel-limits' own provider.",
    }
    assert found["strands"][1].startswith("strands-agents 1.")
    assert status == 0


def test_each_installed_framework_is_probed_without_a_program() -> None:
    """It is said that none was given."""
    status, found = examined(*RUN, PYTHON)
    names = [f"{place} ({each.name})" for each in FRAMEWORKS for place in ("thread pool", "child")]
    assert [found[name] for name in names] == [HALTED] * len(names)
    assert (found["enabled by"][0], found["spans"][0], status) == ("ok", "ok", 0)
    assert found["imports"][1].startswith("No source of a program was given")


def test_only_a_framework_that_the_program_imports_is_probed(tmp_path: Path) -> None:
    """LangChain requests no tracer, so by itself it does not load the tracer provider."""
    program = tmp_path / "app.py"
    program.write_text("from langgraph.graph import StateGraph\nraise SystemExit\n")
    status, found = examined(*SELECTING, PYTHON, str(program))
    assert [name for name, (status, _) in found.items() if status == "FAIL"] == [
        "runaway",
        "enabled by",
    ]
    assert found["langchain"][0] == "ok"
    left_out = ("-", "Not probed: app.py and its own modules do not import it.")
    assert (found["strands"], found["openai-agents"], status) == (left_out, left_out, 1)


def test_framework_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    """The others are still probed."""
    (tmp_path / "app.py").write_text("import langgraph, strands\n")
    for name in ("langgraph", "langgraph-1.dist-info"):
        (tmp_path / "installed" / name).mkdir(parents=True)
    metadata = tmp_path / "installed/langgraph-1.dist-info/METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: langgraph\nVersion: 1\n")
    broken = tmp_path / "installed/langgraph/__init__.py"
    broken.write_text("raise ImportError('no such library')\n")
    words = (*DOCTOR, "--json", "--", *RUN, PYTHON, "app.py")
    status, found = findings(execute_in(tmp_path, *words, PYTHONPATH="installed"))
    assert (status, found["runaway (strands)"][0], found["child (strands)"]) == (1, "ok", HALTED)
    assert found["runaway (langchain)"][0] == "FAIL"
    assert "no such library" in found["runaway (langchain)"][1]


def test_imported_framework_that_is_not_installed_is_named(tmp_path: Path, python: str) -> None:
    """It may be optional, or installed for another Python."""
    program = tmp_path / "app.py"
    program.write_text("import langgraph, strands\n")
    status, found = examined(*RUN, python, str(program))
    text = "Not probed: app.py imports it, but it is not installed."
    assert (status, found["langchain"]) == (0, ("-", text))
    assert "openai-agents" not in found


def test_plain_python_is_found_to_be_uncapped(python: str) -> None:
    """As the command that starts a program it has no limits; there is a way to do better."""
    status, found = examined(python)
    assert status == 1
    assert found["runaway"][0] == "FAIL"
    assert "Not halted at max_turns=3: it made 31 model calls" in found["runaway"][1]
    assert found["enabled by"][1].startswith("Not enabled.Start your program with `otel-limits run")
    assert found["spans"][0] == "-"
    assert found["autoload"] == ("-", f"Not installed for {python}.")


@pytest.mark.parametrize("options", [(), ("--max-turns", "30"), ("--max-turns", "30", "--", "")])
def test_doctor_with_the_options_of_run_or_alone_proves_run(
    options: tuple[str, ...], python: str
) -> None:
    """Programs that are started with run are limited by it, so nothing has failed."""
    words = [python if word == "" else word for word in options]
    started = (python, "-m", "otel_limits.cli", "doctor", "--json", *words)
    status, found = findings(execute(*started))
    assert (status, found["runaway"][0], found["child"]) == (0, "ok", HALTED)
    assert found["enabled by"] == ("ok", "otel-limits run.")
    assert found.get("without run", ("",))[0] == ("" if options else "-")
    assert ("limits" in found) is not bool(options)  # reported if none is set


def test_halted_runaway_does_not_hide_that_the_application_only_observes(python: str) -> None:
    """The runaway has the doctor's own action, and the application that of the environment."""
    status, found = examined(*RUN, "--", python, OTEL_LIMITS_ACTION="observe")
    assert (status, found["runaway"][0], found["action"][0]) == (1, "ok", "FAIL")


def test_instrument_without_its_exporter_is_found_to_be_uncapped(python: str) -> None:
    """OpenTelemetry loads no instrumentor then, and the advice names the missing package."""
    status, found = examined(*INSTRUMENT, python, **WITHOUT_EXPORTER)
    assert (status, found["runaway"][0]) == (1, "FAIL")
    assert "needs the exporters of its distro" in found["enabled by"][1]


@pytest.mark.parametrize(
    ("launcher", "option", "named"),
    [(INSTRUMENT, "-I", "-I or -E"), ((), "-S", "-S")],
    ids=["instrument -I", "-S"],
)
def test_python_that_loads_nothing_of_ours_is_found(
    launcher: tuple[str, ...], option: str, named: str, python: str, only_strands: Path
) -> None:
    """No message can be logged there, and autoload does not help with `-S`."""
    path = f"{ROOT}:{only_strands}"  # there is no site-packages with `-S`
    status, found = examined(*launcher, python, option, PYTHONPATH=path, **NO_EXPORT)
    assert (status, found["runaway"][0], found["enabled by"][0]) == (1, "FAIL", "FAIL")
    assert found["enabled by"][1] == (
        f"Not enabled: Python runs with {named}, and loads nothing of otel-limits."
        f"Start it without {named}, or call otel_limits.enable() in the application's code."
    )


def test_hooks_take_over_where_spans_do_not_arrive(python: str) -> None:
    """That is said, and is no failure."""
    status, found = examined(*RUN, "--", python, OTEL_SDK_DISABLED="true")
    assert (status, found["spans"][0]) == (0, "ok")
    assert "are used instead; limits are enforced" in found["spans"][1]


def test_a_launcher_that_does_not_exist_is_named() -> None:
    """Nothing is started."""
    status, found = examined("no-such-launcher", "app")
    assert (status, found["runaway"][0]) == (1, "FAIL")
    assert found["runaway"][1].startswith("no-such-launcher is not a command here")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a user's program in each form; it leaves a file `mark`."""
    text = PROGRAM.format(python=PYTHON, mark=str(tmp_path / "mark"))
    for name in ("app.py", "serve"):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "alone.py").write_text(f"# /// script\n# dependencies = []\n# ///\n{text}")
    (tmp_path / "start.sh").write_text(f'#!/bin/sh\ntouch {tmp_path}/mark\nexec "$@"\n')
    (tmp_path / "start.sh").chmod(0o755)
    for name in ("gunicorn", "celery"):
        (tmp_path / name).write_text(f"#!{PYTHON}\nimport app\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{BIN}:/usr/bin:/bin")
    return tmp_path


@pytest.mark.parametrize("quote", ['"', "'"])
def test_python_of_an_installed_script_is_read(programs: Path, quote: str) -> None:
    """Its path is too long for a first line, or has a space: pip and uv then write another."""
    python = programs / "a b" / "python"
    python.parent.mkdir()
    python.symlink_to(PYTHON)
    script = programs / "gunicorn"
    text = f"#!/bin/sh\n'''exec' {quote}{python}{quote} \"$0\" \"$@\"\n' '''\nimport app\n"
    script.write_text(text)
    read = read_launcher(["otel-limits", "run", "gunicorn", "app:app"])
    assert read.words == ("otel-limits", "run", "--", str(python))
    assert read.replaced == "gunicorn"


@pytest.mark.parametrize("second", ['\'\'\'exec\' "$HOME/x" "$0" "$@"', 'exec python "$@"', "'"])
def test_script_of_a_shell_is_refused(programs: Path, second: str) -> None:
    """It is not known what another shell script starts."""
    (programs / "gunicorn").write_text(f"#!/bin/sh\n{second}\n")
    with pytest.raises(UnknownLauncherError, match="gunicorn is not a launcher"):
        read_launcher(["gunicorn", "app:app"])


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_of_run_is_refused(option: str) -> None:
    """It would be printed instead of the findings."""
    status, found = examined("otel-limits", "run", option)
    assert (status, found["runaway"][0]) == (1, "FAIL")
    assert found["runaway"][1].startswith("otel-limits run shows its help and starts no program.")


@pytest.mark.parametrize(
    "launcher",
    [
        "python app.py",
        "python -u -m app",
        "python -c 'import app'",
        "./app.py",
        "serve --all",
        "gunicorn -w 2 app:app",
        "celery -A app worker",
        "env -u A B=c python app.py",
        "env -S 'B=c ./app.py'",
        "timeout -k 1 60 nice -n 3 python app.py",
        "otel-limits run --max-turns 30 -- python app.py",
        "opentelemetry-instrument --traces_exporter none ./app.py",
        "env PYTHONPATH=. python -W error::app.W app.py",
        "python -m otel_limits.cli run -- python -W error::app.W app.py",
    ],
)
def test_only_the_added_program_runs(launcher: str, programs: Path) -> None:
    """The words that are left are run as the doctor runs them, with a program of the test."""
    own = programs / "own.py"
    own.write_text("import pathlib, sys; pathlib.Path(sys.argv[1]).touch()")
    words = read_launcher(shlex.split(launcher)).words
    ran = programs / "ran"
    execute_in(programs, *words, str(own), str(ran), PATH=os.environ["PATH"], **NO_EXPORT)
    assert (ran.exists(), (programs / "mark").exists()) == (True, False)


@pytest.mark.parametrize(
    ("launcher", "status"),
    [("otel-limits run -- gunicorn app:app", 0), ("otel-limits run -- ./start.sh app.py", 1)],
)
def test_doctor_starts_only_its_own_program(
    launcher: str, status: int, programs: Path, python: str
) -> None:
    """Put into the place of the user's, or nothing; it says which."""
    (programs / "gunicorn").write_text(f"#!{python}\nimport app\n")
    command = (*DOCTOR, "--json", "--", *launcher.split())
    started = execute_in(programs, *command, PATH=os.environ["PATH"])
    ended, found = findings(started)
    assert (ended, (programs / "mark").exists()) == (status, False)
    assert found["runaway"][0] == ("FAIL" if status else "ok")
    assert ("program" in found) is not bool(status)


def test_settings_of_run_are_examined_and_not_used(tmp_path: Path, python: str) -> None:
    """The runaway is halted at three, and the ledger that is named is not made."""
    ledger = tmp_path / "ledger.db"
    words = (*RUN, "--max-turns", "9", "--ledger", str(ledger), "--", python)
    status, found = examined(*words, OTEL_LIMITS_QUIET="")
    assert (status, found["runaway"][0]) == (0, "ok")
    assert found["settings"][1].startswith("2 set (")
    assert found["ledger"] == ("ok", f"{ledger} is writable.")
    assert list(tmp_path.iterdir()) == []


def shim(directory: Path, python: str, **variables: str) -> str:
    """Make a Python that sets variables for itself, as version managers do."""
    path = directory / "python"
    settings = "".join(f"export {name}={value}\n" for name, value in variables.items())
    path.write_text(f'#!/bin/sh\n{settings}exec {python} "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_a_launcher_that_changes_settings_unseen_gets_no_agent(tmp_path: Path, python: str) -> None:
    """It might write to a real ledger."""
    ledger = tmp_path / "ledger.db"
    status, found = examined(*RUN, "--", shim(tmp_path, python, OTEL_LIMITS_LEDGER=str(ledger)))
    assert (status, found["runaway"][0]) == (1, "FAIL")
    assert "The agent was not called: otel-limits changes OTEL_LIMITS_LEDGER" in found["runaway"][1]
    assert not ledger.exists()


# --- nothing is left ------------------------------------------------------------------------------


@pytest.fixture
def collector() -> Iterator[tuple[str, list[str]]]:
    """Serve what takes everything: its URL, and the paths that something was sent to."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if self.headers["Content-Length"] != "0":  # such as the doctor itself sends
                requests.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(SOON,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", requests
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("launcher", [RUN, INSTRUMENT], ids=["run", "instrument"])
def test_the_runaway_leaves_nothing_anywhere(
    launcher: tuple[str, ...], tmp_path: Path, collector: tuple[str, list[str]], python: str
) -> None:
    """No row, no file, no span at the endpoint, whatever the application is set up with."""
    url, requests = collector
    status, found = examined(
        *(*launcher, python),
        OTEL_LIMITS_LEDGER=str(tmp_path / "ledger.db"),
        OTEL_LIMITS_TOOL_LOG_DIR=str(tmp_path / "tools"),
        OTEL_LIMITS_METRICS="prometheus,otlp",
        OTEL_LIMITS_MAX_MODEL_CALLS="1",
        OTEL_EXPORTER_OTLP_ENDPOINT=url,
        OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf",
        OTEL_BSP_SCHEDULE_DELAY="1",
        OTEL_METRIC_EXPORT_INTERVAL="50",
        XDG_DATA_HOME=str(tmp_path / "data"),
    )
    assert (status, found["runaway"][0], found["otlp"][0]) == (0, "ok", "ok")
    assert requests == []
    assert list(tmp_path.iterdir()) == []


def test_child_that_is_not_limited_fails(tmp_path: Path, python: str) -> None:
    """A launcher may enable limits in its own process only."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, otel_limits\n"
        "if os.environ.pop('FIRST', None): otel_limits.enable(children=False)\n"
    )
    status, found = examined(shim(tmp_path, python, FIRST="1", PYTHONPATH=str(tmp_path)))
    assert found["runaway"][0] == found["thread pool"][0] == "ok"
    assert (status, found["child"][0]) == (1, "FAIL")
    assert "Not halted at max_turns=3: it made 31 model calls" in found["child"][1]
