"""Runs LangChain's and LangGraph's own unit tests three times, and compares case by case.

Without otel-limits, with it and no limits, and with it and limits that are never reached.
`python -m tests.upstream.of_langchain` takes about half an hour. It needs a package index, as
`python -m tests.upstream` does.
"""

from __future__ import annotations

import os
import sys
import tarfile
import tempfile
import venv
from importlib.metadata import version
from pathlib import Path
from typing import Final

from tests.upstream.__main__ import HERE, ROOT, compare, pip, print_line, run

SUITES: Final = {
    "langchain": "tests/unit_tests",
    "langchain-core": "tests/unit_tests",
    "langgraph": "tests",
    "langgraph-prebuilt": "tests",
}
"""The tests in each source distribution. All run offline."""

WITHOUT_GRAPHS: Final = "langchain-core"
"""Its tests call models and tools alone."""

LAYERS: Final = {
    "otel-limits without limits": {"UPSTREAM_WITHOUT_LIMITS": "true"},
    "otel-limits with high limits": {},
}
"""The layer that is on, and its environment variables."""

NEEDED: Final = (
    *("pytest>=9", "pytest-asyncio>=1.3", "pytest-timeout>=2", "pytest-mock", "pytest-socket"),
    *("pytest-benchmark", "syrupy>=5", "blockbuster", "freezegun", "responses", "toml", "numpy"),
    *("fastmcp>=4", "langchain-tests", "langchain-openai", "langchain-text-splitters"),
    *("redis", "pycryptodome"),
    *("langgraph-checkpoint-sqlite", "langgraph-checkpoint-postgres", "psycopg[binary,pool]"),
)
"""Requirements of the tests, in addition to the packages."""


def main() -> int:
    """Return 0 when every case that passes without otel-limits passes with it."""
    os.environ["NO_DOCKER"] = "true"  # LangGraph's tests would start PostgreSQL and Redis
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        releases = [f"{each}=={version(each)}" for each in SUITES]
        venv.create(work / "environment", with_pip=True)
        python = work / "environment" / ("Scripts" if os.name == "nt" else "bin") / "python"
        pip(python, "install", str(ROOT), *releases, *NEEDED, cwd=work)
        return max([of_suite(work, python, each) for each in SUITES])


def of_suite(work: Path, python: Path, name: str) -> int:
    """Compare the tests of one distribution."""
    print_line(f"=== {name}")
    pip(
        sys.executable,
        "download",
        "--no-deps",
        f"--no-binary={name}",
        f"{name}=={version(name)}",
        cwd=work,
    )
    (archive,) = work.glob(f"{name.replace('-', '_')}-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(work / name, filter="data")
    (sources,) = (work / name).iterdir()
    without = run(python, sources, work / "without.xml", [SUITES[name]])
    variables = {"PYTHONPATH": str(HERE)}
    if name == WITHOUT_GRAPHS:
        variables["UPSTREAM_HAS_NO_AGENTS"] = "true"
    results: list[int] = []
    for layer, settings in LAYERS.items():
        print_line(f"=== {name}: {layer}")
        options = ("-p", "limits_on")
        report = work / "with.xml"
        limited = run(python, sources, report, [SUITES[name]], *options, **variables, **settings)
        results.append(compare(without, limited))
    return max(results)


if __name__ == "__main__":
    sys.exit(main())
