"""The matrix of launchers and ways to enable otel-limits, each cell run as a real process.

`python -m tests.generate launchers` writes it into the page on launchers.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import zipapp
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.launching import (
    INSTRUMENT,
    NO_EXPORT,
    PACKAGES,
    RUN,
    Ended,
    execute,
    fresh_environment,
)
from tests.paths import ROOT, SCRIPTS
from tests.processes import PATIENCE_SECONDS, free_port, tied
from tests.programs.runtime.test_autoload import Environment
from tests.programs.runtime.test_workers import ask
from tests.readme import table, with_tables

PROGRAM: Final = SCRIPTS / "launched.py"
PAGE: Final = ROOT / "otel_limits/docs/launchers.md"

AT_A_TIME: Final = 2
"""Cells that run at the same time."""

MAX_TURNS: Final = 3

LIMITED: Final = "limited"
CHILDREN_WARNED: Final = "limited, with a warning that child processes are not"
REFUSED: Final = "refused"
NOT_LIMITED: Final = "**not limited**"

WAYS: Final[Mapping[str, Sequence[str]]] = {
    "`otel-limits run`": (*RUN, "--"),
    "`otel-limits autoload`": (),
    "`opentelemetry-instrument`": INSTRUMENT,
    "`enable()`": (),
}
"""The words before the command, by title of the column."""
RUN_WAY, AUTOLOAD, INSTRUMENT_WAY, ENABLE = WAYS

NOTHING_RUNS: Final = frozenset(
    {
        ("`python -I app.py`", INSTRUMENT_WAY),
        ("`python -S app.py`", INSTRUMENT_WAY),
        ("`python -S app.py`", AUTOLOAD),
    }
)
"""Cells in which Python loads nothing of otel-limits, so that nothing can report it."""


@dataclass(frozen=True, slots=True)
class Place:
    """The interpreter of a cell, and a directory for its files."""

    python: str
    directory: Path


def as_script(place: Place) -> list[str]:
    """Write a console script."""
    script = place.directory / "app"
    script.write_text(
        f"#!{place.python}\nimport sys\nsys.path.insert(0, {str(SCRIPTS)!r})\n"
        "if __name__ == '__main__':\n    from launched import main\n    sys.exit(main())\n"
    )
    script.chmod(0o755)
    return [str(script)]


def as_zipapp(place: Place) -> list[str]:
    """Write a zipapp."""
    source = place.directory / "source"
    source.mkdir()
    for name in ("launched", "served", "strands_agents"):
        (source / f"{name}.py").write_text((SCRIPTS / f"{name}.py").read_text())
    archive = place.directory / "app.pyz"
    zipapp.create_archive(source, archive, main="launched:main")
    return [place.python, str(archive)]


COMMANDS: Final[Mapping[str, Callable[[Place], list[str]]]] = {
    "`python app.py`": lambda place: [place.python, str(PROGRAM)],
    "`python -m app`": lambda place: [place.python, "-m", PROGRAM.stem],
    "a console script": as_script,
    "a zipapp": as_zipapp,
    "`python -I app.py`": lambda place: [place.python, "-I", str(PROGRAM)],
    "`python -S app.py`": lambda place: [place.python, "-S", str(PROGRAM)],
    "workers of `celery`": lambda place: [
        *(place.python, "-m", "celery", "--workdir", str(SCRIPTS), "-A", "queued", "-q"),
        *("worker", "--pool=prefork", "--concurrency=1"),
    ],
}
"""Commands that end by themselves, by title of the row."""

SERVERS: Final[Mapping[str, Sequence[str]]] = {
    "workers of `gunicorn`": ("gunicorn", "launched:wsgi", "--workers=1", "--timeout=60"),
    "workers of `uvicorn`": ("uvicorn", "launched:asgi", "--workers=2"),
}
"""Modules and arguments that serve the application until they are ended."""

LAUNCHERS: Final = (*COMMANDS, *SERVERS)

Cell = tuple[str, str]
"""A launcher and a way to enable."""

CELLS: Final[Sequence[Cell]] = [(launcher, way) for launcher in LAUNCHERS for way in WAYS]

OFTEN: Final[Sequence[Cell]] = [
    ("`python app.py`", ENABLE),
    ("`python -m app`", AUTOLOAD),
    ("a console script", RUN_WAY),
    ("a zipapp", INSTRUMENT_WAY),
    ("`python -I app.py`", RUN_WAY),
    ("`python -I app.py`", AUTOLOAD),
    ("`python -I app.py`", INSTRUMENT_WAY),
    ("`python -S app.py`", RUN_WAY),
    ("`python -S app.py`", AUTOLOAD),
    ("`python -S app.py`", ENABLE),
]
"""Each program and each outcome. All others are run at night, as are the workers.

`tests/programs/runtime/test_workers.py` has a test of each kind of worker.
"""


def outcome(launcher: str, way: str, environment: Environment, directory: Path) -> str:
    """Start an agent that loops with a cap, and one in its spawned child; return what happens."""
    place = Place(environment.python if way == AUTOLOAD else sys.executable, directory)
    variables = {**NO_EXPORT, "PYTHONPATH": str(SCRIPTS)}
    if way == ENABLE:
        variables["CALL_ENABLE"] = "yes"
    else:
        variables["OTEL_LIMITS_MAX_TURNS"] = str(MAX_TURNS)
    if "-S" in launcher:  # it has no site-packages otherwise
        variables["PYTHONPATH"] += f":{ROOT}:{PACKAGES}"
    if launcher in SERVERS:
        ended = served([*WAYS[way], place.python, "-m", *SERVERS[launcher]], variables)
    else:
        ended = execute(*WAYS[way], *COMMANDS[launcher](place), **variables)
    return outcome_of(ended)


def served(command: Sequence[str], variables: Mapping[str, str]) -> Ended:
    """Start a server, send it a request, and end it."""
    port = free_port()
    address = f"--bind=127.0.0.1:{port}" if "gunicorn" in command else f"--port={port}"
    with subprocess.Popen(
        tied(*command, address, signal="TERM"),  # of one with workers
        env=fresh_environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            answer = json.dumps(ask(port))
        finally:
            process.terminate()
            log, _ = process.communicate(timeout=PATIENCE_SECONDS)
    return Ended(process.returncode, answer, log)


def outcome_of(ended: Ended) -> str:
    """Return how a program that has ended was limited."""
    answers = [line for line in ended.output.splitlines() if line.startswith("{")]
    if not answers and ended.status == 2 and "otel-limits: " in ended.log:
        return REFUSED
    if len(answers) != 1:
        raise AssertionError(ended)
    calls = json.loads(answers[0])
    if calls == {"own": MAX_TURNS, "child": MAX_TURNS}:
        return LIMITED
    if calls["own"] == MAX_TURNS and "child processes are not limited" in ended.log:
        return CHILDREN_WARNED
    if calls["own"] > MAX_TURNS and calls["child"] > MAX_TURNS and not ended.ours:
        return NOT_LIMITED
    raise AssertionError(ended)


@contextlib.contextmanager
def running(cells: Sequence[Cell] = CELLS) -> Iterator[Mapping[Cell, Future[str]]]:
    """Run cells, two at a time."""
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(AT_A_TIME) as pool:
        environment = Environment(Path(name) / "environment")
        assert environment.autoload("install").status == 0

        def run(launcher: str, way: str) -> str:
            return outcome(launcher, way, environment, Path(tempfile.mkdtemp(dir=name)))

        try:
            yield {cell: pool.submit(run, *cell) for cell in cells}
        finally:
            pool.shutdown(cancel_futures=True)


def launchers_table() -> str:
    """Run every cell and format the table."""
    with running() as cells:
        rows = [
            [launcher, *(cells[launcher, way].result() for way in WAYS)] for launcher in LAUNCHERS
        ]
    return table(("launcher", *WAYS), rows)


def documented() -> dict[Cell, str]:
    """Return the cells of the page."""
    page = PAGE.read_text(encoding="utf-8")
    (text,) = page.split("<!-- launchers:")[1:]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    titles, _, *rows = lines
    return {
        (launcher, way): cell
        for launcher, *cells in rows
        if launcher in LAUNCHERS
        for way, cell in zip(titles[1:], cells, strict=True)
    }


def write() -> None:
    """Write the table into the page."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_tables(page, {"launchers": launchers_table}), encoding="utf-8")
