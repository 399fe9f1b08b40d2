"""Starts the runaway agent by the launcher that is examined, and says what became of it."""

from __future__ import annotations

import importlib.resources
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from otel_limits.cli.doctor.finding import Finding, fail, nothing, ok
from otel_limits.cli.doctor.launcher import Launcher, server_in
from otel_limits.cli.doctor.sandbox import FORCED, collector, sandboxed
from otel_limits.core.secrets import redact_text
from otel_limits.core.wording import pluralize

PATIENCE_SECONDS: Final = 120
"""How long the runaway may take, the imports of a slow machine included."""

CAP: Final = 3
LAST_WORDS: Final = 5
"""Lines of its output that are shown where it came to nothing."""

WAYS: Final[Mapping[str, str]] = {
    "run": "otel-limits run",
    "autoload": "otel-limits autoload",
    "instrumentor": "opentelemetry-instrument",
    "provider": "OTEL_PYTHON_TRACER_PROVIDER",
    "code": "enable() in code",
    "plugin": "a LimitsPlugin",
}

SWITCH_ON: Final = (
    "Start it with `otel-limits run -- ...`, or run `otel-limits autoload install` once in the "
    "environment of its Python."
)

EXPORTERS: Final = (
    "opentelemetry-instrument loads nobody without the exporter of its distro: pip install "
    "'otel-limits[otlp]', or set OTEL_TRACES_EXPORTER=none "
    "OTEL_METRICS_EXPORTER=none OTEL_LOGS_EXPORTER=none."
)


def examine(launcher: Launcher, environ: Mapping[str, str]) -> list[Finding]:
    """Let the launcher start the runaway in the place of an application.

    Args:
        launcher: What stands before the program.
        environ: What an application would have.
    """
    server = server_in(launcher.words)
    if server is not None:
        return [_about_server(server)]
    with tempfile.TemporaryDirectory(prefix="otel-limits-doctor-") as directory:
        place = Path(directory)
        said = _start(launcher, environ, place)
        try:
            report = json.loads((place / "report.json").read_text(encoding="utf-8"))
        # Without a report it never got as far as its first line, and all there is is what was
        # printed.
        except (OSError, ValueError):
            said = redact_text(said, launcher.words)
            return [fail("runaway", f"It did not run under {launcher.shown}: {said}")]
    return list(_findings(report, launcher))


def _about_server(server: str) -> Finding:
    return fail(
        "runaway",
        f"{server} loads an application by the name of its module and takes no program of ours.",
        f"Examine what starts it with `python` in the place of {server}, such as "
        "`otel-limits doctor -- otel-limits run -- python`. Then start the server, call an agent "
        'once, and look in its log for the line "limits AGENT: ...".',
    )


def _start(launcher: Launcher, environ: Mapping[str, str], place: Path) -> str:
    """Start the runaway and wait for its end; return the last that it said."""
    program = place / "app" / "app.py"  # alone in its directory, which Python puts on its path
    program.parent.mkdir()
    source = importlib.resources.files("otel_limits.demo") / "doctor_agent.py"
    with importlib.resources.as_file(source) as path:
        shutil.copyfile(path, program)
    # Nothing of the sandbox may reach a real collector, whatever the launcher configures by itself.
    with collector() as url:
        command = [*launcher.words, str(program), str(place / "report.json"), json.dumps(FORCED)]
        try:
            done = subprocess.run(  # noqa: S603  the user's own launcher
                command,
                env=sandboxed(environ, place, url),
                # No terminal to wait for: a launcher that asks a question ends instead.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=PATIENCE_SECONDS,
                check=False,
            )
        except OSError as error:
            return f"it cannot be started ({error.strerror})."
        except subprocess.TimeoutExpired:
            return f"it did not end within {PATIENCE_SECONDS} s."
    lines = done.stdout.decode(errors="replace").strip().splitlines()[-LAST_WORDS:]
    return f"it ended with status {done.returncode} and said: {' / '.join(lines) or 'nothing'}"


def _findings(report: Mapping[str, Any], launcher: Launcher) -> Iterator[Finding]:
    # Read by the runaway itself before it calls a model: only there it is known what really holds.
    if "changed" in report:
        yield fail(
            "runaway",
            f"It was not called: {launcher.shown} changes {', '.join(report['changed'])}, and it "
            "could have reached a real ledger or quota.",
            "Set these in the environment of otel-limits doctor instead.",
        )
        return
    yield _halt(report)
    yield _way(report, launcher)
    yield _spans(report)
    yield ok("provider", f"The tracer provider is {report['provider']}.")
    yield from _strands(report)
    if report["autoload"]:
        yield ok("autoload", f"It is installed: {report['autoload']}")
    else:
        yield nothing("autoload", f"It is not installed for {report['python']}.")


def _halt(report: Mapping[str, Any]) -> Finding:
    calls, reason = report["calls"], report["reason"]
    # Both, as a runaway that was cut off by something else also made three calls.
    if (calls, reason) == (CAP, "max_turns"):
        return ok("runaway", f"It was halted after {CAP} of {CAP} turns by {report['python']}.")
    return fail(
        "runaway",
        f"It was not halted at max_turns={CAP}: {pluralize(calls, 'model call')}, and then {reason}.",
    )


def _way(report: Mapping[str, Any], launcher: Launcher) -> Finding:
    source = report["source"]
    if source is not None:
        return ok("switched on by", f"{WAYS.get(source, source)}.")
    advice = SWITCH_ON
    if launcher.has("opentelemetry-instrument"):
        advice = f"{EXPORTERS} Or: {SWITCH_ON}"
    return fail("switched on by", "Nobody.", advice)


def _spans(report: Mapping[str, Any]) -> Finding:
    if report["source"] is None:
        return nothing("spans", "Nobody follows them.")
    if report["spans"]:
        return ok("spans", "Its spans arrived.")
    return ok("spans", "Its spans did not arrive; hooks of Strands took over, and limits hold.")


def _strands(report: Mapping[str, Any]) -> Iterator[Finding]:
    release = f"strands-agents {report['strands']}"
    for sentence in report["obstacles"]:
        yield fail("strands", sentence)
    for sentence in report["weakened"]:
        yield ok("strands", f"{sentence} Limits are still enforced.")
    if not report["obstacles"] and not report["weakened"]:
        yield ok("strands", f"{release}: all that is used of it is there.")
