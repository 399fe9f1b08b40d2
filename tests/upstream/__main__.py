"""Runs a framework's own unit tests three times, and compares case by case.

Without otel-limits, with it and no limits, and with it and limits that are never reached. A case
that differs is repeated alone. It is no difference if it sometimes fails without otel-limits, too.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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

LIMITS_ON: Final = ("-p", "limits_on")

REPEATS: Final = 10
"""Runs of a case that differs, in each way."""

MOST_REPEATED: Final = 20
"""Cases that differ; if there are more, that is no accident."""

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
                compare(Runner(python, each, suite), framework.variables, layer)
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


def compare(runner: Runner, variables: Mapping[str, str], layer: Mapping[str, str]) -> int:
    """Run the tests of one distribution in every way, and compare them."""
    suite = runner.suite
    print_line(f"=== {suite.distribution}: without otel-limits")
    without = runner.run(variables)
    status = 0
    for title, settings in LAYERS.items():
        print_line(f"=== {suite.distribution}: {title}")
        layered = {**variables, **layer, **settings}
        if not suite.has_agents:
            layered["UPSTREAM_HAS_NO_AGENTS"] = "true"
        limited = runner.run(layered, LIMITS_ON)
        print_line(f"without otel-limits: {counts(without)}")
        print_line(f"{title}: {counts(limited)}")
        different = [name for name in without if limited.get(name) != without[name]]
        for name in different:
            print_line(f"  {ENDS[limited.get(name)]} with otel-limits: {name}")
            is_flaky = len(different) <= MOST_REPEATED and runner.is_flaky(name, variables, layered)
            status = status if without[name] or is_flaky else 1
    return status


@dataclass(frozen=True)
class Runner:
    """Runs the tests of one distribution."""

    python: Path
    sources: Path
    suite: Suite

    def run(
        self,
        variables: Mapping[str, str],
        options: Sequence[str] = (),
        tests: Sequence[str] | None = None,
    ) -> dict[str, bool]:
        """Run all of them, or some; returns for each case whether it failed."""
        inherited = {
            name: each for name, each in os.environ.items() if not name.startswith("OTEL_")
        }
        quiet = ["-q", "--disable-warnings", "-p", "no:cacheprovider"]
        # Some files need what the source distribution does not contain.
        quiet += ["--continue-on-collection-errors", f"--timeout={LONGEST_CASE_SECONDS}"]
        named, shown = tests or self.suite.tests, None if tests is None else subprocess.DEVNULL
        with tempfile.TemporaryDirectory() as directory:
            report = Path(directory) / "report.xml"
            done = subprocess.run(
                [
                    str(self.python),
                    "-m",
                    "pytest",
                    *quiet,
                    f"--junit-xml={report}",
                    *options,
                    *named,
                ],
                cwd=self.sources,
                env={**inherited, **variables},
                stdout=shown,
                stderr=shown,
                check=False,
                timeout=LONGEST_RUN_SECONDS,
            )
            if done.returncode not in (0, 1):  # 1: some cases failed
                raise SystemExit(f"pytest ended with status {done.returncode}.")
            return results(report)

    def is_flaky(self, name: str, variables: Mapping[str, str], layered: Mapping[str, str]) -> bool:
        """Repeat a case alone; returns whether it fails without otel-limits, too, but not always.

        Args:
            name: The case.
            variables: The environment without otel-limits.
            layered: The environment with it.
        """
        without = self._failures(name, variables)
        limited = self._failures(name, layered, LIMITS_ON)
        is_flaky = 0 < without < REPEATS
        print_line(
            f"    alone, it fails in {without} of {REPEATS} runs without otel-limits and in "
            f"{limited} with it: {'it is flaky' if is_flaky else 'a difference'}"
        )
        return is_flaky

    def _failures(
        self, name: str, variables: Mapping[str, str], options: Sequence[str] = ()
    ) -> int:
        """Return how often a case fails, in runs at the same time: the machine is busy then."""
        tests = [node_of(self.sources, name)]
        variables = {**variables, "UPSTREAM_HAS_NO_AGENTS": "true"}  # this one may need none

        def has_failed(_: int) -> bool:
            try:
                return self.run(variables, options, tests).get(name, True)
            except SystemExit:  # it cannot run alone
                return True

        with ThreadPoolExecutor(REPEATS) as pool:
            return sum(pool.map(has_failed, range(REPEATS)))


def node_of(sources: Path, name: str) -> str:
    """Return pytest's ID of a case: `tests.test_a.TestB::c` is `tests/test_a.py::TestB::c`."""
    module, _, case = name.partition("::")
    parts = module.split(".")
    files = {end: "/".join(parts[:end]) + ".py" for end in range(len(parts), 0, -1)}
    end = next(end for end, file in files.items() if (sources / file).is_file())
    return "::".join([files[end], *parts[end:], case])


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
