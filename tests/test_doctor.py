"""`otel-limits doctor`: a runaway under real launchers, in a place that nothing leaves."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from otel_limits.bindings.known import FRAMEWORKS
from otel_limits.cli.doctor.doctor_command import as_text, run_options
from otel_limits.cli.doctor.finding import fail
from otel_limits.cli.doctor.runaway import FORCED, read_launcher, sandboxed
from tests.launching import (
    BIN,
    INSTRUMENT,
    NO_EXPORT,
    RUN,
    SELECTED,
    WITHOUT_EXPORTER,
    Ended,
    execute,
)
from tests.processes import SOON
from tests.test_autoload import ROOT, Environment

DOCTOR = (str(BIN / "otel-limits"), "doctor")
PYTHON = sys.executable
SELECTING = ("env", *(f"{name}={value}" for name, value in SELECTED.items()))


def examined(*launcher: str, **variables: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """Examine a launcher."""
    return findings(execute(*DOCTOR, "--json", "--", *launcher, **variables))


def findings(ended: Ended) -> tuple[int, dict[str, tuple[str, str]]]:
    """Return the status, and for each thing that was looked at what was found last."""
    assert ended.log == ""
    found = {
        finding["name"]: (finding["status"], finding["text"] + finding["advice"])
        for finding in json.loads(ended.output)["findings"]
    }
    assert json.loads(ended.output)["ok"] is (ended.status == 0)
    return ended.status, found


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
    assert found["provider"][1].endswith("opentelemetry.sdk.trace.TracerProvider.")
    assert found["strands"][1].startswith("strands-agents 1.")
    assert status == 0


@pytest.mark.parametrize(
    ("launcher", "unlimited"),
    [(RUN, []), (SELECTING, ["child (langchain)"])],
    ids=["run", "tracer provider"],
)
def test_each_framework_is_examined(launcher: tuple[str, ...], unlimited: list[str]) -> None:
    """LangChain requests no tracer, so alone in a child it does not load the provider."""
    status, found = examined(*launcher, PYTHON)
    assert status == bool(unlimited)
    assert [name for name, (status, _) in found.items() if status == "FAIL"] == unlimited
    names = [f"{place} ({each.name})" for each in FRAMEWORKS for place in ("thread pool", "child")]
    assert {name for name in names if found[name] == HALTED} == {*names} - {*unlimited}


def test_plain_python_is_found_to_be_uncapped(python: str) -> None:
    """It is what is examined where no launcher is given; there is a way to do better."""
    status, found = findings(execute(python, "-m", "otel_limits.cli", "doctor", "--json"))
    assert status == 1
    assert found["runaway"][0] == "FAIL"
    assert "Not halted at max_turns=3: it made 31 model calls" in found["runaway"][1]
    assert found["enabled by"][1].startswith("Not enabled.Start your program with `otel-limits run")
    assert found["spans"][0] == "-"


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


@pytest.mark.parametrize("server", ["gunicorn", "uvicorn", "/usr/bin/celery"])
def test_a_server_that_takes_no_program_gets_a_sentence(server: str) -> None:
    """With what to do instead; nothing is started."""
    status, found = examined(*RUN, "--", server, "app:app")
    assert (status, found["runaway"][0]) == (1, "FAIL")
    assert "cannot run the test program" in found["runaway"][1]
    assert "otel-limits doctor -- otel-limits run -- python." in found["runaway"][1]


@pytest.mark.parametrize(
    ("launcher", "said"),
    [
        (("no-such-launcher",), "cannot be started (No such file or directory)"),
        ((PYTHON, "-c", "print('hello')"), "it exited with status 0; output: hello"),
        ((PYTHON, "-c", "raise SystemExit(7)"), "it exited with status 7; output: none"),
    ],
)
def test_a_launcher_that_does_not_run_it_fails(launcher: tuple[str, ...], said: str) -> None:
    """With the last that it said."""
    status, found = examined(*launcher)
    assert (status, found["runaway"][0]) == (1, "FAIL")
    assert said in found["runaway"][1]


# --- what a launcher brings along -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "kept", "settings"),
    [
        ("python -u", "python -u", {}),
        (
            "otel-limits run --max-turns 9 -- python",
            "otel-limits run -- python",
            {"MAX_TURNS": "9"},
        ),
        ("otel-limits run --strict python -I", "otel-limits run -- python -I", {"STRICT": "true"}),
        ("env OTEL_LIMITS_LEDGER=a A=b python", "env A=b python", {"LEDGER": "a"}),
        (
            "opentelemetry-instrument --limits_ledger a --limits_max_turns=9 --x 1 python",
            "opentelemetry-instrument --x 1 python",
            {"LEDGER": "a", "MAX_TURNS": "9"},
        ),
    ],
)
def test_the_settings_of_a_launcher_are_taken_out_of_it(
    words: str, kept: str, settings: dict[str, str]
) -> None:
    """They are examined with the others, and don't reach the runaway."""
    launcher = read_launcher(words.split(), run_options)
    assert " ".join(launcher.words) == kept
    assert launcher.settings == {f"OTEL_LIMITS_{name}": text for name, text in settings.items()}


def test_settings_of_run_are_examined_and_not_used(tmp_path: Path, python: str) -> None:
    """The runaway is halted at three, and the ledger that is named is not made."""
    ledger = tmp_path / "ledger.db"
    words = (*RUN, "--max-turns", "9", "--ledger", str(ledger), "--", python)
    status, found = examined(*words, OTEL_LIMITS_QUIET="")
    assert (status, found["runaway"][0]) == (0, "ok")
    assert found["settings"][1].startswith("2 set, all valid.")
    assert found["ledger"] == ("ok", f"{ledger} is writable.")
    assert list(tmp_path.iterdir()) == []


def test_a_launcher_that_changes_settings_unseen_gets_no_agent(tmp_path: Path, python: str) -> None:
    """It might write to a real ledger."""
    script = f'export OTEL_LIMITS_LEDGER={tmp_path / "ledger.db"}; exec "$@"'
    status, found = examined(*RUN, "--", "sh", "-c", script, "sh", python)
    assert (status, found["runaway"][0]) == (1, "FAIL")
    assert "The agent was not called: otel-limits changes OTEL_LIMITS_LEDGER" in found["runaway"][1]
    assert list(tmp_path.iterdir()) == []


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


def test_the_sandbox_keeps_what_makes_exporters_and_not_where_they_lead() -> None:
    """A launcher that fails without its exporter must fail here as well."""
    environ = {
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4317",
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key=secret",
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_LIMITS_QUOTA_STORE": "redis://store",
        "PROMETHEUS_MULTIPROC_DIR": "/metrics",
        "HOME": "/home",
    }
    made = sandboxed(environ, Path("/place"), "http://sink")
    assert made["OTEL_EXPORTER_OTLP_PROTOCOL"] == "grpc"
    assert made["OTEL_TRACES_EXPORTER"] == "otlp"
    assert made["HOME"] == "/home"
    assert made["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://sink"
    assert not {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS"} & made.keys()
    assert "PROMETHEUS_MULTIPROC_DIR" not in made
    # A collector may be where exporters look for it by default.
    assert sandboxed({}, Path("/place"), "http://sink")["OTEL_EXPORTER_OTLP_ENDPOINT"]
    ours: dict[str, Any] = {n: v for n, v in made.items() if n.startswith("OTEL_LIMITS_")}
    assert ours == FORCED


def test_report_is_ascii_and_contains_the_fix() -> None:
    """Build logs show it."""
    report = as_text([fail("policy", "grün", "Write it in → plain text.")])
    assert report == "FAIL  policy  gr\\xfcn\n              -> Write it in \\u2192 plain text.\n"


def test_child_that_is_not_limited_fails(tmp_path: Path, python: str) -> None:
    """A launcher may enable limits in its own process only."""
    launcher = tmp_path / "launcher.py"
    launcher.write_text(
        "import otel_limits, runpy, sys; otel_limits.enable(children=False)\n"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    status, found = examined(python, str(launcher))
    assert found["runaway"][0] == found["thread pool"][0] == "ok"
    assert (status, found["child"][0]) == (1, "FAIL")
    assert "Not halted at max_turns=3: it made 31 model calls" in found["child"][1]
