"""Runs a framework's own unit tests three times, and compares case by case.

Without otel-limits, with it and no limits, and with it and limits that are never reached.
`python -m tests.upstream FRAMEWORK` takes ten minutes to half an hour. It needs a package index for
the source distributions of the release that is installed here, and for what their tests need.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

from tests.upstream.frameworks import FRAMEWORKS, Framework, Suite

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]

LAYERS: Final[Mapping[str, Mapping[str, str]]] = {
    "with otel-limits, without limits": {"UPSTREAM_WITHOUT_LIMITS": "true"},
    "with otel-limits and high limits": {},
}
"""The layer that is on, and its environment variables."""

ENDS: Final = {None: "does not run", True: "fails", False: "passes"}
"""The end of a case, by whether it has failed."""

LONGEST_RUN_SECONDS: Final = 3600
LONGEST_CASE_SECONDS: Final = 300
"""Strands stops a case after 90: on a busy machine its own spans alone take one that long."""


def main() -> int:
    """Return 0 when every case that passes without otel-limits passes with it."""
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=__doc__)
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("--provider", action="store_true", help="set an SDK tracer provider")
    arguments = parser.parse_args()
    framework = FRAMEWORKS[arguments.framework]
    layer = {"PYTHONPATH": str(HERE)}
    if arguments.provider:
        layer["UPSTREAM_TRACER_PROVIDER"] = "true"
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        sources = [unpack(work, each.distribution) for each in framework.suites]
        python = install(work, framework, sources)
        return max(
            [
                compare(python, each, suite, framework.variables, layer)
                for each, suite in zip(sources, framework.suites, strict=True)
            ]
        )


def install(work: Path, framework: Framework, sources: Sequence[Path]) -> Path:
    """Make a virtual environment for the tests; returns its Python."""
    venv.create(work / "environment", with_pip=True)
    programs = "Scripts" if os.name == "nt" else "bin"
    python = work / "environment" / programs / "python"
    suites = zip(sources, framework.suites, strict=True)
    packages = [argument for each, suite in suites for argument in suite.installed(each)]
    pip(python, "install", str(ROOT), *packages, *framework.needed, cwd=work)
    return python


def compare(
    python: Path,
    sources: Path,
    suite: Suite,
    variables: Mapping[str, str],
    layer: Mapping[str, str],
) -> int:
    """Run the tests of one distribution in every way, and compare them."""
    print_line(f"=== {suite.distribution}: without otel-limits")
    without = run(python, sources, suite, variables)
    status = 0
    for title, settings in LAYERS.items():
        print_line(f"=== {suite.distribution}: {title}")
        options = {**variables, **layer, **settings}
        if not suite.has_agents:
            options["UPSTREAM_HAS_NO_AGENTS"] = "true"
        limited = run(python, sources, suite, options, "-p", "limits_on")
        print_line(f"without otel-limits: {counts(without)}")
        print_line(f"{title}: {counts(limited)}")
        for name, has_failed in without.items():
            if limited.get(name) != has_failed:
                print_line(f"  {ENDS[limited.get(name)]} with otel-limits: {name}")
                status = status if has_failed else 1
    return status


def unpack(work: Path, distribution: str) -> Path:
    """Download the source distribution and unpack it; returns its folder."""
    source_only = ("--no-deps", f"--no-binary={distribution}")
    release = f"{distribution}=={version(distribution)}"
    pip(sys.executable, "download", *source_only, release, cwd=work)
    (archive,) = work.glob(f"{distribution.replace('-', '_')}-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(work / distribution, filter="data")
    (sources,) = (work / distribution).iterdir()
    return sources


def pip(python: Path | str, command: str, *arguments: str, cwd: Path) -> None:
    """Run pip quietly."""
    subprocess.run([python, "-m", "pip", command, "--quiet", *arguments], check=True, cwd=cwd)


def run(
    python: Path, sources: Path, suite: Suite, variables: Mapping[str, str], *options: str
) -> dict[str, bool]:
    """Run a framework's tests; returns for each case whether it failed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    report = sources / "report.xml"
    quiet = ["-q", "--disable-warnings", "-p", "no:cacheprovider", f"--junit-xml={report}"]
    # Some files need what the source distribution does not contain.
    quiet += ["--continue-on-collection-errors", f"--timeout={LONGEST_CASE_SECONDS}"]
    done = subprocess.run(
        [python, "-m", "pytest", *quiet, *options, *suite.tests],
        cwd=sources,
        env={**inherited, **variables},
        check=False,
        timeout=LONGEST_RUN_SECONDS,
    )
    if done.returncode not in (0, 1):  # 1: some cases failed
        raise SystemExit(f"pytest ended with status {done.returncode}.")
    return results(report)


def results(report: Path) -> dict[str, bool]:
    """Read from a report of pytest's whether each case, or one of its fixtures, has failed."""
    found: dict[str, bool] = {}
    for case in ET.parse(report).iter("testcase"):  # noqa: S314  pytest has just written it
        name = f"{case.get('classname')}::{case.get('name')}"
        has_failed = case.find("failure") is not None or case.find("error") is not None
        found[name] = found.get(name, False) or has_failed
    return found


def counts(cases: Mapping[str, bool]) -> str:
    """Describe the results of all cases."""
    failed = sum(cases.values())
    return f"{len(cases)} cases, {len(cases) - failed} passed, {failed} failed"


def print_line(text: str) -> None:
    """Print a line before pytest prints its own."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
