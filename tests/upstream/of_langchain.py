"""Runs LangChain's and LangGraph's own tests with otel-limits and without, and compares them.

`python -m tests.upstream.of_langchain` takes about fifteen minutes. It needs a package index, as
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

SUITES: Final[dict[str, tuple[str, ...]]] = {
    "langchain": ("tests/unit_tests/agents", "tests/unit_tests/chat_models"),
    "langchain-core": (
        "tests/unit_tests/language_models",
        "tests/unit_tests/runnables",
        "tests/unit_tests/test_tools.py",
        # It needs a module that the released langchain-tests does not have.
        "--ignore=tests/unit_tests/language_models/test_compat_bridge.py",
    ),
    "langgraph": ("tests",),
}
"""The parts of each that run graphs, chat models and tools."""

NEEDED: Final = (
    *("pytest>=9", "pytest-asyncio>=1.3", "pytest-timeout>=2", "pytest-mock", "pytest-socket"),
    *("syrupy>=5", "blockbuster", "freezegun", "responses", "langchain-tests", "numpy"),
    *("langchain-openai", "langchain-text-splitters", "redis", "pycryptodome"),
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
    without = run(python, sources, work / "without.xml", SUITES[name])
    layer = ("-p", "limits_on")
    variables = {"PYTHONPATH": str(HERE)}
    if name == "langchain-core":  # called without graphs
        variables["UPSTREAM_HAS_NO_AGENTS"] = "true"
    limited = run(python, sources, work / "with.xml", SUITES[name], *layer, **variables)
    return compare(without, limited)


if __name__ == "__main__":
    sys.exit(main())
