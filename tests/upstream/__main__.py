"""Runs Strands' own tests twice, without otel-limits and with it, and compares case by case.

`python -m tests.upstream [--provider]` takes about ten minutes. It needs a package index for the
source distribution of the Strands that is installed here, and for what its tests need.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
FOLDERS: Final = (
    *("agent", "event_loop", "telemetry", "hooks", "middleware", "plugins", "interventions"),
    *("types", "multiagent", "session"),
)
"""The parts of Strands that run an agent, or that otel-limits attaches to."""
STRANDS: Final = tuple(f"tests/strands/{name}" for name in FOLDERS)

NEEDED: Final = ("pytest>=9", "pytest-asyncio>=1", "pytest-timeout>=2", "moto>=5.1")
"""Requirements of Strands' tests in these folders, in addition to the package with its extras."""

LONGEST_RUN_SECONDS: Final = 3600
LONGEST_CASE_SECONDS: Final = 300
"""Strands stops a case after 90: on a busy machine its own spans alone take one that long."""


def main() -> int:
    """Return 0 when every case that passes without otel-limits passes with it."""
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=__doc__)
    parser.add_argument(
        "--provider", action="store_true", help="set an SDK tracer provider: spans are followed"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        release = f"=={version('strands-agents')}"
        sources = unpack(work, release)
        python = install(work, release)
        without = run(python, sources, work / "without.xml", STRANDS)
        layer = ["-p", "limits_on"]
        variables = {"PYTHONPATH": str(HERE)}
        if arguments.provider:
            variables["UPSTREAM_TRACER_PROVIDER"] = "true"
        limited = run(python, sources, work / "with.xml", STRANDS, *layer, **variables)
    return compare(without, limited)


def unpack(work: Path, release: str) -> Path:
    """Download the source distribution and unpack it; returns its folder."""
    source_only = ("--no-deps", "--no-binary=strands-agents")
    pip(sys.executable, "download", *source_only, f"strands-agents{release}", cwd=work)
    (archive,) = work.glob("strands_agents-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(work / "sources", filter="data")
    (sources,) = (work / "sources").iterdir()
    return sources


def install(work: Path, release: str) -> Path:
    """Make a virtual environment for the tests; returns its Python."""
    venv.create(work / "environment", with_pip=True)
    programs = "Scripts" if os.name == "nt" else "bin"
    python = work / "environment" / programs / "python"
    pip(python, "install", str(ROOT), f"strands-agents[a2a,otel]{release}", *NEEDED, cwd=work)
    return python


def print_line(text: str) -> None:
    """Print a line before pytest prints its own."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def pip(python: Path | str, command: str, *arguments: str, cwd: Path) -> None:
    """Run pip quietly."""
    subprocess.run([python, "-m", "pip", command, "--quiet", *arguments], check=True, cwd=cwd)


def run(
    python: Path, sources: Path, report: Path, suite: Sequence[str], *options: str, **variables: str
) -> set[str]:
    """Run a framework's tests; returns the names of all cases, with a `!` if they failed."""
    print_line(f"== {'with otel-limits' if options else 'without otel-limits'}")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    quiet = ["-q", "--disable-warnings", "-p", "no:cacheprovider", f"--junit-xml={report}"]
    quiet.append(f"--timeout={LONGEST_CASE_SECONDS}")
    done = subprocess.run(
        [python, "-m", "pytest", *quiet, *options, *suite],
        cwd=sources,
        env=inherited | variables,
        check=False,
        timeout=LONGEST_RUN_SECONDS,
    )
    if done.returncode not in (0, 1):  # 1: some cases failed
        raise SystemExit(f"pytest ended with status {done.returncode}.")
    return set(results(report))


def results(report: Path) -> list[str]:
    """Read the names of all cases from a report of pytest's."""
    return [
        f"{case.get('classname')}::{case.get('name')}{'!' if is_failed(case) else ''}"
        for case in ET.parse(report).iter("testcase")  # noqa: S314  pytest has just written it
    ]


def is_failed(case: ET.Element) -> bool:
    """Return whether a case or one of its fixtures failed."""
    return case.find("failure") is not None or case.find("error") is not None


def compare(without: set[str], limited: set[str]) -> int:
    """Print both results, and every case that ends otherwise with otel-limits."""
    for title, cases in (("without otel-limits", without), ("with otel-limits", limited)):
        failed = sum(name.endswith("!") for name in cases)
        print_line(f"{title}: {len(cases)} cases, {len(cases) - failed} passed, {failed} failed")
    different = sorted(limited - without)
    for name in different:
        print_line(f"  otherwise with otel-limits: {name}")
    print_line(f"{len(different)} cases end otherwise with otel-limits.")
    return 1 if any(name.endswith("!") for name in different) or limited < without else 0


if __name__ == "__main__":
    sys.exit(main())
