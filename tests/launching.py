"""Starts programs whose agents are limited from outside, and reads what they say of themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.paths import SCRIPTS
from tests.processes import PATIENCE_SECONDS

PACKAGES = Path(sysconfig.get_path("purelib"))
ENDLESS = str(SCRIPTS / "endless.py")
BIN = Path(sys.executable).parent
RUN = (str(BIN / "otel-limits"), "run")
INSTRUMENT = (str(BIN / "opentelemetry-instrument"),)

NO_EXPORT = {f"OTEL_{signal_}_EXPORTER": "none" for signal_ in ("TRACES", "METRICS", "LOGS")}
"""The distro would export to a collector, and fails without its exporter."""

WITHOUT_EXPORTER = {**NO_EXPORT, "OTEL_TRACES_EXPORTER": "not_installed"}
"""opentelemetry-instrument gives up before it has loaded any. Nothing else is exported: at its
end, a program would wait for a collector that is not there, and gRPC hangs in some forks."""

SELECTED = {"OTEL_PYTHON_TRACER_PROVIDER": "otel_limits"}


@dataclass(frozen=True)
class Ended:
    """A program that has come to its end."""

    status: int
    output: str
    log: str

    @property
    def events(self) -> dict[str, Any]:
        """What `endless.py` printed."""
        events: dict[str, Any] = json.loads(self.output)
        return events

    @property
    def ours(self) -> list[str]:
        """Lines of the log in which we speak."""
        signs = ("otel-limits", " halted by ")
        return [line for line in self.log.splitlines() if any(sign in line for sign in signs)]


WITHOUT_LANGCHAIN = {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "langchain"}
"""Import no LangChain in each process, as two instrumentations of this environment would."""


def fresh_environment(**variables: str) -> dict[str, str]:
    """Make a clean shell environment."""
    strange = ("OTEL_", "PYTHON", "PROMETHEUS_")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(strange)}
    # One-time messages have separate tests.
    kept |= {"OTEL_LIMITS_QUIET": "true", "PATH": f"{BIN}{os.pathsep}{kept['PATH']}"}
    return kept | WITHOUT_LANGCHAIN | variables


def link_packages(directory: Path, *left_out: str) -> None:
    """Link all installed packages into a directory, except those whose names begin like these."""
    for path in PACKAGES.iterdir():
        if not path.name.startswith(left_out):
            (directory / path.name).symlink_to(path)


def execute(*command: str, **variables: str) -> Ended:
    """Run a command to its end."""
    return execute_in(BIN, *command, **variables)


def execute_in(directory: Path, *command: str, **variables: str) -> Ended:
    """Run a command to its end, in a directory."""
    done = subprocess.run(
        command,
        env=fresh_environment(**variables),
        cwd=directory,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)
