"""Runs the runaway agent under a launcher, isolated, and reports whether it was halted."""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.installed import INSTALL_ANY
from otel_limits.bindings.known import FRAMEWORKS
from otel_limits.cli.doctor.finding import Finding, fail, ok, skipped
from otel_limits.core.secrets import redact_text
from otel_limits.core.wording import pluralize
from otel_limits.settings.otel_config import harmless_copy
from otel_limits.settings.table import PREFIX
from otel_limits.settings.variables import OTLP_PREFIX

if TYPE_CHECKING:
    from otel_limits.cli.doctor.launcher import Launcher

FORCED: Final = {
    PREFIX + "MAX_TURNS": "3",
    PREFIX + "ACTION": "halt",
    PREFIX + "LEDGER": "none",
    PREFIX + "METRICS": "prometheus",
}
"""The runaway agent's only settings: quotas in memory, no port, no policy, no tool log."""

DISABLED_DELAY: Final = "86400000"
"""Milliseconds before an export, longer than the runaway agent runs."""

NO_EXPORT: Final = {
    "OTEL_BSP_SCHEDULE_DELAY": DISABLED_DELAY,
    "OTEL_BLRP_SCHEDULE_DELAY": DISABLED_DELAY,
    "OTEL_METRIC_EXPORT_INTERVAL": DISABLED_DELAY,
    "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
    "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
    "DD_REMOTE_CONFIGURATION_ENABLED": "false",
}
"""Disables background exports."""

DROPPED: Final = ("PROMETHEUS_MULTIPROC_DIR", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE")


class _Answer(BaseHTTPRequestHandler):
    """Accepts and discards all requests."""

    def do_POST(self) -> None:
        """Accept an export."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_PUT = do_POST  # noqa: N815  used for Datadog traces

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def collector() -> Iterator[str]:
    """Serve a substitute for all export endpoints; yield its URL."""
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
    """Return the environment of the runaway agent.

    Args:
        environ: The application's environment.
        place: The only directory it may write to.
        url: The only endpoint it may export to.
    """
    # Without otel-limits settings, or it would count in a real ledger and real quotas.
    kept = {
        name: text
        for name, text in environ.items()
        if not name.startswith(PREFIX) and name not in DROPPED
    }
    for name in [name for name in kept if name.startswith(OTLP_PREFIX)]:
        # Remove endpoints and credentials; keep the rest, which is under test.
        if name.endswith(("_ENDPOINT", "_HEADERS", "_CERTIFICATE", "_CLIENT_KEY", "_INSECURE")):
            del kept[name]
    return {
        **kept,
        **harmless_copy(kept, place, url),
        # Always set, as there may be a collector at the default endpoint.
        OTLP_PREFIX + "ENDPOINT": url,
        **NO_EXPORT,
        **FORCED,
        "DD_TRACE_AGENT_URL": url,
        "XDG_DATA_HOME": str(place),
    }


PATIENCE_SECONDS: Final = 120
"""Timeout of the runaway agent, including imports on a slow machine."""

CAP: Final = 3
TAIL_LINES: Final = 5
"""Lines of output to show if it failed."""

SOURCES: Final[Mapping[str, str]] = {
    "run": "otel-limits run",
    "autoload": "otel-limits autoload",
    "instrumentor": "opentelemetry-instrument",
    "provider": "OTEL_PYTHON_TRACER_PROVIDER",
    "code": "enable() in code",
    "parent": "enable() in the parent process",
    "plugin": "a LimitsPlugin",
}

SWITCH_ON: Final = (
    "Start your program with `otel-limits run -- ...`, or run `otel-limits autoload install` once "
    "in its Python environment."
)

EXPORTERS: Final = (
    "opentelemetry-instrument needs the exporters of its distro. Run: pip install "
    "'otel-limits[otlp]', or set OTEL_TRACES_EXPORTER=none "
    "OTEL_METRICS_EXPORTER=none OTEL_LOGS_EXPORTER=none."
)


def examine(launcher: Launcher, environ: Mapping[str, str]) -> list[Finding]:
    """Run the runaway agent under a launcher instead of an application.

    Args:
        launcher: The launcher under test.
        environ: The application's environment.
    """
    with tempfile.TemporaryDirectory(prefix="otel-limits-doctor-") as directory:
        place = Path(directory)
        outcome = _start(launcher, environ, place)
        try:
            report = json.loads((place / "report.json").read_text(encoding="utf-8"))
        # Without a report, the program did not start; its output is all there is.
        except (OSError, ValueError):
            outcome = redact_text(outcome, launcher.words)
            text = f"The test agent did not run under {launcher.shown}: {outcome}"
            return [fail("runaway", text)]
    return list(_findings(report, launcher))


def _start(launcher: Launcher, environ: Mapping[str, str], place: Path) -> str:
    """Run the agent's program; return a description of its end."""
    program = place / "app" / "app.py"  # alone in its directory, which is on its path
    program.parent.mkdir()
    source = importlib.resources.files("otel_limits.demo") / "doctor_agent.py"
    with importlib.resources.as_file(source) as path:
        shutil.copyfile(path, program)
    # A launcher may configure exporters; none may reach a real collector.
    with collector() as url:
        report = str(place / "report.json")
        frameworks = {each.module: each.distribution for each in FRAMEWORKS}
        arguments = (report, json.dumps(FORCED), json.dumps(frameworks))
        command = [*launcher.words, str(program), *arguments]
        try:
            done = subprocess.run(  # noqa: S603  the user's own launcher
                command,
                env=sandboxed(environ, place, url),
                # So a launcher that prompts for input ends.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=PATIENCE_SECONDS,
                check=False,
            )
        except OSError as error:
            return f"it cannot be started ({error.strerror})."
        except subprocess.TimeoutExpired:
            return f"it timed out after {PATIENCE_SECONDS} s."
    lines = done.stdout.decode(errors="replace").strip().splitlines()[-TAIL_LINES:]
    return f"it exited with status {done.returncode}; output: {' / '.join(lines) or 'none'}"


def _findings(report: Mapping[str, Any], launcher: Launcher) -> Iterator[Finding]:
    # The program compares its variables itself, before it calls the agent.
    if "changed" in report:
        yield fail(
            "runaway",
            f"The agent was not called: {launcher.shown} changes {', '.join(report['changed'])}, "
            "so it could have used a real ledger or quota.",
            "Set these in the environment of otel-limits doctor instead.",
        )
        return
    if launcher.replaced:
        yield ok("program", f"{report['python']} was started in place of {launcher.replaced}.")
    frameworks = report["frameworks"]
    if frameworks:
        for framework in frameworks:
            yield from _halts(framework, report, len(frameworks))
        yield _source(report, launcher)
        yield _spans(report)
        yield ok("provider", f"{report['provider']}.")
    else:
        yield fail(
            "runaway",
            f"No supported agent framework is installed for {report['python']}.",
            INSTALL_ANY,
        )
    for framework in frameworks:
        yield from _apis(framework)
    if report["autoload"]:
        yield ok("autoload", f"Installed: {report['autoload']}")
    else:
        yield skipped("autoload", f"Not installed for {report['python']}.")


def _halts(
    framework: Mapping[str, Any], report: Mapping[str, Any], frameworks: int
) -> Iterator[Finding]:
    """Report whether the agent of a framework was halted, everywhere."""
    of = "" if frameworks == 1 else f" ({framework['name']})"
    yield _halt(f"runaway{of}", framework["here"], f", in {report['python']}")
    if report["source"] is not None:
        yield _halt(f"thread pool{of}", framework["thread"])
        yield _halt(f"child{of}", framework["child"])


def _halt(name: str, report: Mapping[str, Any], place: str = "") -> Finding:
    """Report whether an agent was halted there."""
    if "error" in report:
        return skipped(name, f"Cannot be started: {report['error']}.")
    calls, reason = report["calls"], report["reason"]
    # Another cause could also end it after three calls.
    if (calls, reason) == (CAP, "max_turns"):
        return ok(name, f"Halted after {CAP} of {CAP} turns{place}.")
    return fail(
        name,
        f"Not halted at max_turns={CAP}: it made {pluralize(calls, 'model call')} and ended with "
        f"{reason}.",
    )


def _source(report: Mapping[str, Any], launcher: Launcher) -> Finding:
    source = report["source"]
    if source is not None:
        return ok("enabled by", f"{SOURCES.get(source, source)}.")
    option = report["option"]
    if option is not None:
        return fail(
            "enabled by",
            f"Not enabled: Python runs with {option}, and loads nothing of otel-limits.",
            f"Start it without {option}, or call otel_limits.enable() in the application's code.",
        )
    advice = SWITCH_ON
    if launcher.has("opentelemetry-instrument"):
        advice = f"{EXPORTERS} Or: {SWITCH_ON}"
    return fail("enabled by", "Not enabled.", advice)


def _spans(report: Mapping[str, Any]) -> Finding:
    if report["source"] is None:
        return skipped("spans", "Not enabled.")
    without = [each for each in report["frameworks"] if not each["spans"]]
    if not without:
        return ok("spans", "Received.")
    if any(each["obstacles"] for each in without):
        return skipped("spans", "Not received, and limits are not enforced.")
    names = ", ".join(each["name"] for each in without)
    return ok("spans", f"Not received. Hooks of {names} are used instead; limits are enforced.")


def _apis(framework: Mapping[str, Any]) -> Iterator[Finding]:
    """Report the APIs of a framework that are missing."""
    name = framework["name"]
    for sentence in framework["obstacles"]:
        yield fail(name, sentence)
    for sentence in framework["weakened"]:
        yield ok(name, f"{sentence} Limits are still enforced.")
    if not framework["obstacles"] and not framework["weakened"]:
        yield ok(name, f"{framework['release']}: all required APIs exist.")
