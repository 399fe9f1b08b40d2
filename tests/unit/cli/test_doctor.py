"""`otel-limits doctor`: a runaway under real launchers, and the OTLP endpoints of settings."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.cli.doctor.doctor_command import findings_of
from otel_limits.cli.doctor.finding import Context, as_text, fail
from otel_limits.cli.doctor.framework_checks import read_imports
from otel_limits.cli.doctor.launcher import UnknownLauncherError, read_launcher
from otel_limits.cli.doctor.runaway import FORCED, sandboxed
from tests.launching import (
    BIN,
    Ended,
    execute,
)

if TYPE_CHECKING:
    from otel_limits.cli.doctor.finding import Finding


DOCTOR = (str(BIN / "otel-limits"), "doctor")
PYTHON = sys.executable


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


@pytest.mark.parametrize(
    ("program", "shown", "frameworks"),
    [
        ("python app.py", "app.py", "langchain strands"),
        ("python -u -m app --port 1", "app", "langchain strands"),
        ("python -um package", "package", "openai-agents"),
        ("python -c 'import agents'", "-c", "openai-agents"),
        ("python -c 'import package.inner'", "-c", "openai-agents"),
        ("python -c 'import app, package'", "-c", "langchain openai-agents strands"),
        ("python lazy.py", "lazy.py", "strands"),
        ("python through.py", "through.py", "strands"),
        ("python broken.py", "broken.py", ""),
        ("python elsewhere/own.py", "own.py", ""),
        ("python near.py", "near.py", ""),
        ("python -m missing", "", ""),
        ("python", "", ""),
        ("./serve --all", "serve", "openai-agents"),
        ("gunicorn -w 2 app:app", "gunicorn, app", "langchain strands"),
        ("celery --app=package worker", "celery, package", "langchain openai-agents strands"),
        ("uv run app.py", "app.py", "langchain strands"),
        ("uv run --module=app", "app", "langchain strands"),
        ("uv run gunicorn app:app", "gunicorn, app", "langchain strands"),
        ("env A=b otel-limits run -- python app.py", "app.py", "langchain strands"),
        ("env PYTHONPATH=. python app.py", "app.py", "langchain strands"),
    ],
)
def test_imports_of_a_program_are_read(
    program: str, shown: str, frameworks: str, programs: Path
) -> None:
    """Those of the program's modules, and the requirements of other packages; nothing runs."""
    texts = {
        "app.py": "import helper, os\nfrom strands import Agent\n",
        "helper.py": "if True:\n    from langgraph.graph import StateGraph\n",
        "package/__init__.py": "from .inner import deep\n",
        "package/inner/__init__.py": "from ..part import Runner\n",
        "package/inner/deep.py": "",
        "package/part.py": "from agents import Runner\n",
        "lazy.py": "def serve():\n    import strands.agent\n",
        "through.py": "import made_of_strands\n",
        "broken.py": "import strands\nclass\n",
        "elsewhere/own.py": "import agents\n",
        "elsewhere/agents/__init__.py": "",
        "near.py": "import otel_limits\n",  # next to a checkout
        "otel_limits/__init__.py": "import agents\n",
        "dependencies/made_of_strands/__init__.py": "import agents",
        "dependencies/made_of_strands-1.dist-info/METADATA": "Name: made-of-strands\n"
        "Requires-Dist: strands-agents>=1\nRequires-Dist: langgraph; extra == 'all'\n",
    }
    for name, text in texts.items():
        (programs / name).parent.mkdir(parents=True, exist_ok=True)
        (programs / name).write_text(text)
    (programs / "serve").write_text(f"#!{PYTHON}\nimport agents\n")
    sys.path.append(str(programs / "dependencies"))
    try:
        words = read_launcher(shlex.split(program)).program
        read = read_imports(words, {"PYTHONPATH": "dependencies"})
    finally:
        sys.path.remove(str(programs / "dependencies"))
    assert (read.shown, " ".join(sorted(read.frameworks))) == (shown, frameworks)
    assert not (programs / "mark").exists()


# --- only its own program -------------------------------------------------------------------------

PROGRAM = """\
#!{python}
import pathlib
pathlib.Path({mark!r}).touch()
def app(environ, start_response): ...
"""


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


RUN_PYTHON = f"otel-limits run -- {PYTHON}"


@pytest.mark.parametrize(
    ("launcher", "words", "replaced"),
    [
        ("python app.py", "python", ""),
        ("python -u -X dev -m app --port 1", "python -u -X dev", ""),
        ("python -c 'import app'", "python", ""),
        ("./app.py", PYTHON, "app.py"),
        ("serve --all", PYTHON, "serve"),
        ("gunicorn -w 2 app:app", PYTHON, "gunicorn"),
        ("celery -A app worker", PYTHON, "celery"),
        ("otel-limits run --max-turns 30 python app.py", "otel-limits run -- python", ""),
        ("otel-limits run -- gunicorn app:app", RUN_PYTHON, "gunicorn"),
        ("otel-limits run --max-turns 30", RUN_PYTHON, ""),
        ("env -u A B=c python app.py", "env -u A B=c python", ""),
        ("env -S 'B=c ./app.py'", f"env B=c {PYTHON}", "app.py"),
        ("timeout -k 1 5 nice -n 3 python app.py", "timeout -k 1 5 nice -n 3 python", ""),
        (
            "opentelemetry-instrument --x 1 ./app.py",
            f"opentelemetry-instrument --x 1 {PYTHON}",
            "app.py",
        ),
        ("ddtrace-run python app.py", "ddtrace-run python", ""),
        ("uv run app.py", "uv run python", "app.py"),
        ("uv run --with x -m app", "uv run --with x python", "app"),
        ("uv run --frozen gunicorn app:app", "uv run --frozen python", "gunicorn"),
        ("poetry run python -I app.py", "poetry run python -I", ""),
        ("uv run --module=app", "uv run python", "app"),
        ("uv run otel-limits run -- python app.py", "uv run otel-limits run -- python", ""),
        (
            "uv run timeout --signal KILL 5 ./app.py",
            "uv run timeout --signal KILL 5 python",
            "app.py",
        ),
        ("", PYTHON, ""),
        ("python -W error::app.W -b app.py", "python -b", ""),
        ("python -Werror::app.W app.py", "python", ""),
        ("python -bW error::app.W:x:1 app.py", "python -b", ""),
        ("python -X presite=app -X dev app.py", "python -X dev", ""),
        ("python -W error::BytesWarning -Wonce app.py", "python -W error::BytesWarning -Wonce", ""),
        (
            "python -u -m otel_limits.cli run --max-turns 3 -- ./app.py",
            f"python -u -m otel_limits.cli run -- {PYTHON}",
            "app.py",
        ),
        (
            f"python {BIN}/otel-limits run python app.py",
            f"python {BIN}/otel-limits run -- python",
            "",
        ),
        (
            "python -W error::app.W -m otel_limits.cli run python -Wx::app.W app.py",
            "python -m otel_limits.cli run -- python",
            "",
        ),
    ],
)
def test_program_of_the_user_is_put_aside(
    launcher: str, words: str, replaced: str, programs: Path
) -> None:
    """The remaining words start a Python, and the doctor adds its own program."""
    read = read_launcher(shlex.split(launcher))
    assert (" ".join(read.words), read.replaced) == (words, replaced)


@pytest.mark.parametrize(
    ("launcher", "missing"),
    [
        ("python app.py", ""),
        ("otel-limits run -- python -u missing.py --port 1", "missing.py"),
        ("python /missing/app.py", "/missing/app.py"),
        ("env -C elsewhere python missing.py", ""),
        ("env --chdir=elsewhere python missing.py", ""),
        ("env -C elsewhere python /missing/app.py", "/missing/app.py"),
        ("uv run https://example.org/app.py", ""),
        ("uv run missing.py", "missing.py"),
        ("uv run gunicorn app:app", ""),
        ("python -m missing", ""),
        ("python", ""),
    ],
)
def test_missing_script_is_named(launcher: str, missing: str, programs: Path) -> None:
    """The doctor does not start it, so nothing else would report a misspelled name."""
    assert read_launcher(shlex.split(launcher)).missing_script() == missing


@pytest.mark.parametrize(
    ("launcher", "named"),
    [
        ("./start.sh python app.py", "start.sh"),
        ("sh -c 'python app.py'", "sh"),
        ("otel-limits run -- bash start.sh", "bash"),
        ("timeout 5 ./start.sh python app.py", "start.sh"),
        ("flock lock -c 'KEY=secret python app.py'", "flock"),
        ("uv run serve", "serve"),
        ("uv run alone.py", "alone.py"),
        ("uv run --unknown serve python", "serve"),
        ("uv serve", "serve"),
        ("otel-limits run -- uv serve", "serve"),
        ("sudo -u joe elsewhere python app.py", "elsewhere"),
        ("touch mark", "touch"),
        ("env '--split=python app.py'", "env"),
        ("env '-vSpython app.py'", "env"),
        ("env '-iSpython app.py'", "env"),
        ("env -S 'python \"app.py'", "env"),
        ("chrt -i ./app.py", "app.py"),
        ("uv run --script app.py", "uv"),
    ],
)
def test_command_of_unknown_form_is_refused(launcher: str, named: str, programs: Path) -> None:
    """With the line that tests it."""
    with pytest.raises(UnknownLauncherError) as refused:
        read_launcher(shlex.split(launcher))
    assert refused.value.text.startswith(f"{named} ")
    assert refused.value.text.endswith("was not started: it could be your program.")
    run = "otel-limits run -- " if launcher.startswith("otel-limits") else ""
    assert refused.value.advice == f"Run: otel-limits doctor -- {run}THE PYTHON IT ENDS IN"


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
    launcher = read_launcher(words.split())
    assert " ".join(launcher.words) == kept
    found = {name: text for name, text in launcher.settings.items() if name.startswith("OTEL_")}
    assert found == {f"OTEL_LIMITS_{name}": text for name, text in settings.items()}


# --- nothing is left ------------------------------------------------------------------------------


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


def test_report_fits_the_terminal() -> None:
    """Text is wrapped between words, in its column; a path is never broken."""
    path = "/srv/" + "a" * 60
    report = as_text([fail("ledger", f"Not readable, as is its parent: {path}.", "Fix it.")], 60)
    indent = " " * 14
    assert report.splitlines() == [
        "FAIL  ledger  Not readable, as is its parent:",
        f"{indent}{path}.",
        f"{indent}-> Fix it.",
    ]


# --- OTLP endpoints -------------------------------------------------------------------------------


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what is found where variables have these values, named without OTEL_EXPORTER_OTLP_."""

    def find(**variables: str) -> list[Finding]:
        for name, text in variables.items():
            monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", text)
        findings = findings_of("doctor", Context(dict(os.environ)))
        return [each for each in findings if each.name == "otlp"]

    return find


def test_without_an_endpoint_there_is_nothing_to_say(found: Any) -> None:
    """The default of opentelemetry-instrument is not ours to ask."""
    assert [each.status for each in found()] == ["-"]


@pytest.mark.parametrize("url", ["http://[", "http://:99999", "//", "http://u:hunter2@/"])
def test_an_endpoint_that_is_not_a_url_is_a_failure(found: Any, url: str) -> None:
    """Without a traceback, and without what it may hold."""
    findings = found(ENDPOINT=url)
    assert {each.status for each in findings} == {"FAIL"}
    assert "hunter2" not in str(findings)


# --- a configuration in a file --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["OTEL_CONFIG_FILE", "OTEL_EXPERIMENTAL_CONFIG_FILE"])
def test_exporters_of_a_file_are_said_to_be_untested(
    found: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its text is a program of OpenTelemetry's, so it is not read."""
    monkeypatch.setenv(name, "otel.yaml")
    (finding,) = found()
    sentence = f"The exporters in the file of {name} are not tested."
    assert (finding.status, finding.text) == ("-", sentence)


@pytest.mark.parametrize("name", ["OTEL_CONFIG_FILE", "OTEL_EXPERIMENTAL_CONFIG_FILE"])
def test_the_runaway_gets_no_file(name: str, tmp_path: Path) -> None:
    """Its exporters could lead to a real collector."""
    assert name not in sandboxed({name: "otel.yaml"}, tmp_path, "http://sink")
