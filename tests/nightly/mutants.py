"""Applies the faults of `mutants.tsv` one at a time, and checks that its tests notice each.

Usage: python -m tests.nightly.mutants [FILTER]

FILTER is a part of a row, such as a file or a test. The exit status is 1 if a mutant survives, if
all tests of a row are gone, or if a test fails without a fault. A row whose line is gone is listed.

The faults are in a temporary copy of the checkout. It comes first in PYTHONPATH, so programs that a
test starts import the copy as well, unless the test gives them its own environment.

Columns of `mutants.tsv`: a file, its line, which of its lines with this text it is, the line with
the fault, the operator of cosmic-ray that made it, the tests that noticed it first, and those that
do today: `FILE::TEST` without folder, separated by `; `, or `survivor: REASON` if none can.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

ROOT: Final = Path(__file__).parents[2]
TABLE: Final = Path(__file__).with_suffix(".tsv")
COPIED: Final = ("otel_limits", "tests", "dashboards", ".github", ".ci")
COPIED_FILES: Final = ("README.md", "LICENSE", "pyproject.toml")

SEPARATOR: Final = "; "
SURVIVOR: Final = "survivor: "
SURVIVED: Final = "SURVIVED"
TESTS_GONE: Final = "ALL TESTS ARE GONE"
NOT_RUN: Final = "TESTS DO NOT RUN"
TESTS_FAILED: Final = 1
"""The exit status of pytest; others above it mean that it could not run the tests."""
MOST_SECONDS: Final = 60
"""How long a test may take: some faults are loops without an end."""


class Mutant(NamedTuple):
    """A row of `mutants.tsv`."""

    file: str
    old: str
    nth: str
    new: str
    operator: str
    first_killers: str
    today: str

    @property
    def names(self) -> list[str]:
        """Names of the tests that notice it."""
        return [] if self.today.startswith(SURVIVOR) else self.today.split(SEPARATOR)

    def applied(self, source: str) -> str | None:
        """Return the source with the fault, or `None` if the line is gone."""
        lines = source.splitlines(keepends=True)
        places = [place for place, line in enumerate(lines) if line.strip() == self.old]
        if len(places) < int(self.nth):
            return None
        place = places[int(self.nth) - 1]
        lines[place] = lines[place].replace(self.old, self.new)
        return "".join(lines)


class Checkout:
    """A copy of the checkout in which tests run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in COPIED:
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in COPIED_FILES:
            shutil.copy2(ROOT / name, root / name)

    def pytest(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run it on the copy."""
        return subprocess.run(
            (sys.executable, "-m", "pytest", "-n", "0", "-q", *arguments),
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(self.root)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )

    def collect(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the tests by name, with parameters and without, of all files that are named."""
        files = {name.partition("::")[0] for name in names}
        paths = [path for path in (self.root / "tests").rglob("test_*.py") if path.name in files]
        if not paths:  # or pytest would collect all tests
            return {}
        arguments = sorted(str(path.relative_to(self.root)) for path in paths)
        done = self.pytest("--collect-only", *arguments)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        found = defaultdict(list)
        for test in filter(lambda line: "::" in line, done.stdout.splitlines()):
            path, _, function = test.partition("::")
            for each in {function, function.partition("[")[0]}:
                found[f"{Path(path).name}::{each}"].append(test)
        return found

    def failing(self, tests: Collection[str]) -> set[str]:
        """Return the tests that do not pass without a fault."""
        if not tests:
            return set()
        done = self.pytest("-rA", "--tb=no", *tests)
        passed = {
            line.removeprefix("PASSED ")
            for line in done.stdout.splitlines()
            if line.startswith("PASSED ")
        }
        return set(tests) - passed

    def outcome(self, mutant: Mutant, tests: Collection[str]) -> str:
        """Return what the tests make of a fault."""
        file = self.root / mutant.file
        source = file.read_text(encoding="utf-8") if file.exists() else ""
        changed = mutant.applied(source)
        if changed is None:
            return "line is gone"
        if not tests:
            return TESTS_GONE if mutant.names else "known survivor"
        times = file.stat()
        file.write_text(changed, encoding="utf-8")
        try:
            # Of a thread, which ends pytest: a loop with a fault may catch the error of a signal.
            limit = ("--timeout", str(MOST_SECONDS), "--timeout-method", "thread")
            done = self.pytest("-x", *limit, *tests)
        finally:
            file.write_text(source, encoding="utf-8")
            # Or the bytecode of a fault that was as long would be taken for that of the source.
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        if done.returncode > TESTS_FAILED:
            return f"{NOT_RUN}\n{done.stdout}{done.stderr}"
        return "killed" if done.returncode == TESTS_FAILED else SURVIVED


def read_mutants(part: str) -> list[Mutant]:
    """Return the rows that contain a text."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
    return [Mutant(*row) for row in rows if part in "\t".join(row)]


def show(text: str) -> None:
    """Print a line immediately."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """Print what becomes of each mutant; return 1 if one survives."""
    mutants = read_mutants(" ".join(arguments))
    names = {name for mutant in mutants for name in mutant.names}
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        checkout = Checkout(Path(directory))
        found = checkout.collect(names)
        failing = checkout.failing({test for name in names for test in found.get(name, ())})
        for text in (
            *(f"test is gone  {name}" for name in sorted(names - found.keys())),
            *(f"FAILS WITHOUT A FAULT  {test}" for test in sorted(failing)),
        ):
            show(text)
        for mutant in mutants:
            tests = {test for name in mutant.names for test in found.get(name, ())} - failing
            outcome = checkout.outcome(mutant, sorted(tests))
            show(f"{outcome}  {mutant.file}: {mutant.new}")
            outcomes[outcome.partition("\n")[0]] += 1
    figures = (f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
    show(f"{len(mutants)} mutants: {', '.join(figures)}; {len(failing)} tests fail without a fault")
    return 1 if failing or outcomes.keys() & {SURVIVED, TESTS_GONE, NOT_RUN} else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
