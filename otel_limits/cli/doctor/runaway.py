"""Starts the runaway agent by the launcher that is examined, and says what became of it."""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePath
from typing import Any, Final

from otel_limits.cli.doctor.finding import Finding, fail, ok, skipped
from otel_limits.core.secrets import redact_text, redact_url
from otel_limits.core.wording import pluralize
from otel_limits.settings.declared import harmless_copy
from otel_limits.settings.table import PREFIX
from otel_limits.settings.variables import OTLP_PREFIX

SERVERS: Final = frozenset(
    {
        "celery",
        "chainlit",
        "daphne",
        "dramatiq",
        "fastapi",
        "flask",
        "granian",
        "gunicorn",
        "hypercorn",
        "rq",
        "streamlit",
        "uvicorn",
        "uwsgi",
        "waitress-serve",
    }
)
"""They load an application by the name of its module, and take no program in its place."""

INSTRUMENT_OPTION: Final = re.compile(r"--(limits_\w+)(?:=(.*))?", re.DOTALL)
"""How `opentelemetry-instrument` takes a variable of ours: without its OTEL_."""

ASSIGNMENT: Final = re.compile(rf"({PREFIX}\w+)=(.*)", re.DOTALL)
"""How `env` takes one."""

RunOptions = Callable[[Sequence[str]], "tuple[dict[str, str], list[str]]"]
"""Reads the arguments of `otel-limits run`: variables, and the command."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher without the settings that it would bring along."""

    words: tuple[str, ...]
    settings: dict[str, str]
    """Variables that it would set: they are examined, and kept from the runaway."""

    @property
    def shown(self) -> str:
        """Its name; the other words may hold a secret."""
        return PurePath(redact_url(self.words[0])).name

    def has(self, program: str) -> bool:
        """Tell whether a program is among its words."""
        return any(PurePath(word).name == program for word in self.words)


def read_launcher(words: Sequence[str], run_options: RunOptions) -> Launcher:
    """Take the settings out of a launcher."""
    settings: dict[str, str] = {}
    kept: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        option = INSTRUMENT_OPTION.fullmatch(word)
        assignment = ASSIGNMENT.fullmatch(word)
        # They are taken out of the words: the launcher would set them again over those of the
        # runaway.
        if option is not None:
            value = option[2] if option[2] is not None else (rest.pop(0) if rest else "")
            settings["OTEL_" + option[1].upper()] = value
        elif assignment is not None:
            settings[assignment[1]] = assignment[2]
        elif PurePath(word).name == "otel-limits" and rest[:1] == ["run"]:
            variables, rest = run_options(rest[1:])
            settings |= variables
            # `run` stays, without its options: it is a way of starting a program, and that is
            # examined.
            kept += [word, "run", "--"]
        else:
            kept.append(word)
    return Launcher(tuple(kept), settings)


def server_in(words: Sequence[str]) -> str | None:
    """Find a server in a command that would not run a program of ours."""
    names = (PurePath(word).name for word in words)
    return next((name for name in names if name in SERVERS), None)


FORCED: Final = {
    PREFIX + "MAX_TURNS": "3",
    PREFIX + "ACTION": "halt",
    PREFIX + "LEDGER": "none",
    PREFIX + "METRICS": "prometheus",
}
"""Settings of the runaway; it has no other: quotas in memory, no port, no policy, no tool log."""

DISABLED_DELAY: Final = "86400000"
"""Milliseconds until something is exported: the runaway ends before."""

NO_EXPORT: Final = {
    "OTEL_BSP_SCHEDULE_DELAY": DISABLED_DELAY,
    "OTEL_BLRP_SCHEDULE_DELAY": DISABLED_DELAY,
    "OTEL_METRIC_EXPORT_INTERVAL": DISABLED_DELAY,
    "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
    "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
    "DD_REMOTE_CONFIGURATION_ENABLED": "false",
}
"""What would send by itself, batch by batch."""

DROPPED: Final = ("PROMETHEUS_MULTIPROC_DIR", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE")


class _Answer(BaseHTTPRequestHandler):
    """Takes everything, and keeps nothing."""

    def do_POST(self) -> None:
        """Take what would have gone to a collector."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_PUT = do_POST  # noqa: N815  how Datadog's traces are sent

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def collector() -> Iterator[str]:
    """Stand in for whatever the environment exports to; yields its URL."""
    # Port 0: a free one, as the doctor may run beside anything.
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answer)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def sandboxed(environ: Mapping[str, str], place: Path, url: str) -> dict[str, str]:
    """Make the environment of the runaway.

    Args:
        environ: That of an application.
        place: Where it may write.
        url: Where it may send to.
    """
    # Our own settings go, or a real ledger and real quotas would count a runaway.
    kept = {
        name: text
        for name, text in environ.items()
        if not name.startswith(PREFIX) and name not in DROPPED
    }
    for name in [name for name in kept if name.startswith(OTLP_PREFIX)]:
        # What leads somewhere, and what opens the doors there: the rest of a configuration is
        # examined.
        if name.endswith(("_ENDPOINT", "_HEADERS", "_CERTIFICATE", "_CLIENT_KEY", "_INSECURE")):
            del kept[name]
    return {
        **kept,
        **harmless_copy(kept, place, url),
        # Also where none is named: a collector may be where exporters look for it by default.
        OTLP_PREFIX + "ENDPOINT": url,
        **NO_EXPORT,
        **FORCED,
        "DD_TRACE_AGENT_URL": url,
        "XDG_DATA_HOME": str(place),
    }


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
        yield skipped("autoload", f"It is not installed for {report['python']}.")


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
        return skipped("spans", "Nobody follows them.")
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
