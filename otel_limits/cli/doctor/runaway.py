"""Runs runaway agents under a launcher, isolated, and reports whether they were halted."""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from otel_limits.bindings.known import FRAMEWORKS, install_any, know
from otel_limits.cli.doctor.finding import Finding, fail, ok, skipped, warn
from otel_limits.cli.doctor.framework_checks import read_imports
from otel_limits.cli.doctor.launcher import UnknownLauncherError
from otel_limits.core.installing import install_command
from otel_limits.core.limits import PREFIX
from otel_limits.core.secrets import redact_text
from otel_limits.core.wording import pluralize
from otel_limits.runtime.autoload import OUTDATED, RENEW
from otel_limits.settings.variables import CONFIGURATION_FILES, OTLP_PREFIX

if TYPE_CHECKING:
    from otel_limits.cli.doctor.finding import Context
    from otel_limits.cli.doctor.framework_checks import Imports
    from otel_limits.cli.doctor.launcher import Launcher

Modules: TypeAlias = tuple[str, str]
"""The module of a framework that programs import, and its distribution."""

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

DROPPED: Final = (
    "PROMETHEUS_MULTIPROC_DIR",
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
    *CONFIGURATION_FILES,  # whose exporters could lead anywhere
)


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

WITHOUT_RUN: Final = (
    "Nothing else enables limits: the agent was halted because the doctor started it with "
    "otel-limits run. Without it, Python enforces none."
)

EXPORTERS: Final = (
    "opentelemetry-instrument needs the exporters of its distro. Run: {}, or set "
    "OTEL_TRACES_EXPORTER=none OTEL_METRICS_EXPORTER=none OTEL_LOGS_EXPORTER=none."
)


def examine(context: Context) -> list[Finding]:
    """Run a runaway agent of each framework that the application imports, instead of it.

    Each is started for itself: a framework that requests a tracer would enable the limits of one
    that does not.
    """
    launcher, environ, others = context.launcher, context.environ, context.third_party
    know(others.entry_points)
    if launcher is None:
        return []
    if isinstance(launcher, UnknownLauncherError):
        return [fail("runaway", launcher.text, launcher.advice)]
    imports = read_imports(launcher.program, environ)
    known: dict[str, Modules] = {each.name: (each.module, each.distribution) for each in FRAMEWORKS}
    wanted = [modules for name, modules in known.items() if name in imports.frameworks]
    first = _report(launcher, environ, [*wanted, *known.values()])
    is_plain = not launcher.is_given and _needs_run(first)
    if is_plain:
        launcher = launcher.under_run()
        first = _report(launcher, environ, list(known.values()))
    if "changed" in first:
        return [_changed(first, launcher)]
    if "installed" not in first:
        return list(_halts(first, "", launcher))
    installed = first["installed"]
    imported = [name for name in installed if name in imports.frameworks]
    rest = [name for name in imported or installed if name != first["name"]]
    probed = ({"name": name, **_report(launcher, environ, [installed[name]])} for name in rest)
    return [
        *_findings([first, *probed], launcher),
        *([skipped("without run", WITHOUT_RUN, SWITCH_ON)] if is_plain else []),
        *_choice(imports, imported, {**known, **installed}, installed),
        *(fail("frameworks", sentence) for sentence in others.broken),
        *(skipped("frameworks", sentence) for sentence in (*others.unused, *others.absent)),
        _autoload(first),
    ]


def _needs_run(report: Mapping[str, Any]) -> bool:
    """Return whether nothing was to enable limits in a Python; a broken autoload was."""
    is_off = report.get("name") is not None and report["source"] is None
    return is_off and report["option"] is None and not report["autoload"]


def _report(
    launcher: Launcher, environ: Mapping[str, str], frameworks: Sequence[Modules]
) -> dict[str, Any]:
    """Run the agent of the first framework that is installed; return its report."""
    with tempfile.TemporaryDirectory(prefix="otel-limits-doctor-") as directory:
        place = Path(directory)
        outcome = _start(launcher, environ, place, frameworks)
        try:
            report: dict[str, Any] = json.loads((place / "report.json").read_text("utf-8"))
        # Without a report, the program did not start; its output is all there is.
        except (OSError, ValueError):
            return {"error": outcome}
    return report


def _start(
    launcher: Launcher, environ: Mapping[str, str], place: Path, frameworks: Sequence[Modules]
) -> str:
    """Run the agent's program; return a description of its end."""
    program = place / "app" / "app.py"  # alone in its directory, which is on its path
    program.parent.mkdir()
    source = importlib.resources.files("otel_limits.demo") / "doctor_agent.py"
    with importlib.resources.as_file(source) as path:
        shutil.copyfile(path, program)
    # A launcher may configure exporters; none may reach a real collector.
    with collector() as url:
        report = str(place / "report.json")
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


def _changed(report: Mapping[str, Any], launcher: Launcher) -> Finding:
    """Report settings that the launcher changed, as the program found before it called agents."""
    return fail(
        "runaway",
        f"The agent was not called: {launcher.shown} changes {', '.join(report['changed'])}, "
        "so it could have used a real ledger or quota.",
        "Set these in the environment of otel-limits doctor instead.",
    )


def _findings(reports: Sequence[Mapping[str, Any]], launcher: Launcher) -> Iterator[Finding]:
    """Report the results of frameworks."""
    python = reports[0]["python"]
    if launcher.replaced:
        yield ok("program", f"{python} was started in place of {launcher.replaced}.")
    if missing := launcher.missing_script():
        # Only a warning: limits are enforced, and an image may be tested before its programs exist.
        yield warn("program", f"{missing} does not exist, so its imports were not read.")
    if reports[0]["name"] is None:
        yield fail(
            "runaway", f"No supported agent framework is installed for {python}.", install_any()
        )
        return
    for report in reports:
        yield from _halts(report, "" if len(reports) == 1 else f" ({report['name']})", launcher)
    ran = [report for report in reports if "error" not in report]
    yield from _shared([(each["name"], _source(each, launcher)) for each in ran])
    yield from _shared([(each["name"], _spans(each)) for each in ran])
    yield from _shared([(each["name"], ok("provider", f"{_provider(each)}.")) for each in ran])
    for report in ran:
        yield from _apis(report)


def _provider(report: Mapping[str, Any]) -> str:
    """Name the tracer provider; the fallback has no name that users know."""
    name = str(report["provider"])
    return "otel-limits' own provider" if name.startswith("otel_limits.") else name


def _shared(found: Sequence[tuple[str, Finding]]) -> Iterator[Finding]:
    """Report once what is alike for all frameworks."""
    if len({finding for _, finding in found}) == 1:
        yield found[0][1]
        return
    for framework, finding in found:
        yield replace(finding, name=f"{finding.name} ({framework})")


def _choice(
    imports: Imports, imported: Sequence[str], known: Iterable[str], installed: Collection[str]
) -> Iterator[Finding]:
    """Report which frameworks were left out, or why none was."""
    if imported:
        for name in known:
            if name in imports.frameworks and name not in installed:
                text = f"Not probed: {imports.shown} imports it, but it is not installed."
                yield skipped(name, text)
            elif name in installed and name not in imported:
                text = f"Not probed: {imports.shown} and its own modules do not import it."
                yield skipped(name, text)
    elif len(installed) > 1 and imports.shown:
        text = f"{imports.shown} and its own modules import no installed framework, "
        yield skipped("imports", f"{text}so each was probed.")
    elif len(installed) > 1:
        text = "No source of a program was given or found, so each installed framework was probed."
        yield skipped("imports", text, "otel-limits doctor -- otel-limits run -- python app.py")


def _autoload(report: Mapping[str, Any]) -> Finding:
    path, reason = report["autoload"], report["outdated"]
    if reason is not None:
        return warn("autoload", OUTDATED.format(path=path, reason=reason), RENEW)
    if path:
        return ok("autoload", f"Installed: {path}")
    return skipped("autoload", f"Not installed for {report['python']}.")


def _halts(report: Mapping[str, Any], of: str, launcher: Launcher) -> Iterator[Finding]:
    """Report whether the agent of a framework was halted, everywhere."""
    if "error" in report:
        error = redact_text(report["error"], launcher.words)
        text = f"The test agent did not run under {launcher.shown}: {error}"
        yield fail(f"runaway{of}", text)
        return
    yield _halt(f"runaway{of}", report["here"], f", in {report['python']}")
    if report["source"] is not None:
        yield _halt(f"thread pool{of}", report["thread"])
        yield _halt(f"child{of}", report["child"])


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
    advice = SWITCH_ON if report["outdated"] is None else RENEW
    if launcher.has("opentelemetry-instrument"):
        advice = f"{EXPORTERS.format(install_command('otlp'))} Or: {advice}"
    return fail("enabled by", "Not enabled.", advice)


def _spans(report: Mapping[str, Any]) -> Finding:
    if report["source"] is None:
        return skipped("spans", "Not enabled.")
    if report["spans"]:
        return ok("spans", "Received.")
    if report["obstacles"]:
        return skipped("spans", "Not received, and limits are not enforced.")
    name = report["name"]
    return ok("spans", f"Not received. Hooks of {name} are used instead; limits are enforced.")


def _apis(framework: Mapping[str, Any]) -> Iterator[Finding]:
    """Report the APIs of a framework that are missing."""
    name = framework["name"]
    for sentence in framework["obstacles"]:
        yield fail(name, sentence)
    for sentence in framework["weakened"]:
        yield ok(name, f"{sentence} Limits are still enforced.")
    if not framework["obstacles"] and not framework["weakened"]:
        yield ok(name, f"{framework['release']}: all required APIs exist.")
