"""One uncapped program under every launcher, in every order, with every kind of worker.

The program does not know of limits. Where a test here expects the cap to hold, it must: a way of
starting that is not here, or in the README as one that cannot work, is a hole.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.launching import (
    ENDLESS,
    INSTRUMENT,
    NO_EXPORT,
    RUN,
    SELECTED,
    WITHOUT_EXPORTER,
    execute,
)
from tests.matrix import (
    COMMANDS,
    NOT_LIMITED,
    NOTHING_RUNS,
    OFTEN,
    WAYS,
    Cell,
    documented,
    running,
)
from tests.programs.runtime.test_autoload import Environment

CAP = {"OTEL_LIMITS_MAX_TURNS": "3", "OTEL_LIMITS_LEDGER": "none"}
PYTHON = (sys.executable,)
SDK = str(Path(ENDLESS).with_name("sdk_agents.py"))


@pytest.fixture
def broken(tmp_path: Path) -> str:
    """Return a directory for the path with an instrumentor that raises, the first of all."""
    info = tmp_path / "a_broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a-broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[opentelemetry_instrumentor]\na = a_broken:Broken\n")
    (tmp_path / "a_broken.py").write_text(
        "class Broken:\n    def instrument(self, **_):\n        raise RuntimeError('broken')\n"
    )
    return str(tmp_path)


ORDERS = {
    "run": RUN,
    "run, instrument": (*RUN, "--", *INSTRUMENT),
    "instrument, run": (*INSTRUMENT, *RUN, "--"),
    "run, shell, instrument": (*RUN, "--", "sh", "-c", 'exec opentelemetry-instrument "$@"', "sh"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_cap_holds_under_run_in_every_order(order: str) -> None:
    """Counted once and told once, and OpenTelemetry instruments what it does without us."""
    ended = execute(*ORDERS[order], *PYTHON, ENDLESS, **CAP, **NO_EXPORT)
    assert (ended.events["stop_reason"], ended.events["model_calls"]) == ("max_turns", 3)
    assert ended.events["samples"]["otel_limits_turns_total endless"] == 3
    assert [line.split(":")[0] for line in ended.ours] == [
        "Agent 'endless' was halted by max_turns"
    ]
    assert ended.events["threads_instrumented"] is ("instrument" in order)


@pytest.mark.parametrize(
    ("order", "argument"),
    [("instrument, run", "--own-provider"), ("run, instrument", "")],
)
def test_the_cap_holds_under_run_where_opentelemetry_gives_up(order: str, argument: str) -> None:
    """Without its exporter it hides every other `sitecustomize` and loads no instrumentor."""
    ended = execute(*ORDERS[order], *PYTHON, ENDLESS, argument, **CAP, **WITHOUT_EXPORTER)
    assert (ended.events["stop_reason"], ended.events["model_calls"]) == ("max_turns", 3)


@pytest.mark.parametrize("front", [INSTRUMENT, (*RUN, "--", *INSTRUMENT)], ids=["alone", "run"])
def test_an_instrumentor_that_raises_does_not_stop_ours(
    front: tuple[str, ...], broken: str
) -> None:
    """OpenTelemetry loads no instrumentor after it."""
    ended = execute(*front, *PYTHON, ENDLESS, PYTHONPATH=broken, **CAP, **NO_EXPORT)
    assert "Instrumenting of a failed" in ended.log
    assert (ended.events["stop_reason"], ended.events["model_calls"]) == ("max_turns", 3)


@pytest.mark.parametrize("disabled", ["threading, otel_limits, langchain", "*"])
def test_disabled_instrumentor_stays_disabled(disabled: str) -> None:
    """Also code that runs before any of them is loaded."""
    ended = execute(
        *(*INSTRUMENT, *PYTHON, ENDLESS),
        OTEL_PYTHON_DISABLED_INSTRUMENTATIONS=disabled,
        **CAP,
        **NO_EXPORT,
    )
    assert ended.events["model_calls"] > 3


@pytest.fixture(scope="module")
def without_distro(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the Python of an environment that has everything but opentelemetry-distro."""
    made = Environment(tmp_path_factory.mktemp("environment"))
    # Its entry points are what OpenTelemetry looks for.
    made.leave_out(tmp_path_factory.mktemp("packages"), "opentelemetry_distro")
    return made.python


@pytest.mark.parametrize("order", ["instrument", "run, instrument"])
def test_the_cap_holds_without_distro(without_distro: str, order: str) -> None:
    """OpenTelemetry loads its instrumentors then, and us with them; it only exports nothing."""
    module = "opentelemetry.instrumentation.auto_instrumentation"  # of opentelemetry-instrument
    program = f"from {module} import run; run()"
    words = {
        "instrument": (without_distro, "-c", program),
        "run": (without_distro, "-m", "otel_limits.cli", "run", "--"),
    }
    front = [word for name in order.split(", ") for word in words[name]]
    ended = execute(*front, without_distro, ENDLESS, **CAP)
    assert (ended.events["stop_reason"], ended.events["model_calls"]) == ("max_turns", 3)


def test_instrument_without_its_exporter_limits_no_agent() -> None:
    """The README documents it, as OpenTelemetry does: it loads no instrumentor at all."""
    ended = execute(*INSTRUMENT, *PYTHON, ENDLESS, **CAP, **WITHOUT_EXPORTER)
    assert ended.events["model_calls"] > 3
    assert "Failed to auto initialize OpenTelemetry" in ended.log


@pytest.mark.parametrize(("argument", "holds"), [("", True), ("--own-provider", False)])
def test_the_tracer_provider_of_the_environment_reaches_who_sets_none(
    argument: str, *, holds: bool
) -> None:
    """It is only loaded if no code sets a provider, as the README documents."""
    ended = execute(*PYTHON, ENDLESS, argument, **CAP, **SELECTED)
    assert (ended.events["model_calls"] == 3) is holds


def test_tracer_requested_while_the_agents_sdk_is_imported_limits_its_first_run() -> None:
    """Its dependency `mcp` 2 requests one. The program runs its agent right after the import."""
    ended = execute(*PYTHON, SDK, **CAP, **SELECTED)
    assert ended.events == {"model_calls": 3, "stop_reason": "max_turns"}


# --- what a launcher leaves to interpreters that the program starts -------------------------------

WAITS = "import sys; print('otel_limits_startup' in sys.modules)"
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"


def test_children_of_an_instrumented_program_are_reached_too() -> None:
    """OpenTelemetry puts itself first on the path again after it has begun."""
    front = (*RUN, "--", *INSTRUMENT)
    ended = execute(*front, *PYTHON, "-c", PARENT, WAITS, **WITHOUT_EXPORTER)
    assert ended.output == "True\n"


def test_a_path_that_we_are_not_on_is_left_alone() -> None:
    """Removing otel-limits for one child is deliberate."""
    program = (
        "import os, sys\n"
        "environ = {**os.environ, 'PYTHONPATH': '/nowhere'}\n"
        "os.execve(sys.executable, [sys.executable, '-c', sys.argv[1]], environ)"
    )
    assert execute(*RUN, "--", *PYTHON, "-c", program, WAITS).output == "False\n"


def test_programs_are_replaced_as_before() -> None:
    """By position and by name, and with what is not a dictionary."""
    program = (
        "import os, sys\n"
        "next_ = [sys.executable, '-c', 'import sys; print(sys.argv[1])', sys.argv[1]]\n"
        "if sys.argv[1] == 'execl': os.execl(sys.executable, *next_)\n"
        "if sys.argv[1] == 'execvp': os.execvp(sys.executable, next_)\n"
        "if sys.argv[1] == 'execve': os.execve(path=sys.executable, argv=next_, env=os.environ)\n"
    )
    for name in ("execl", "execvp", "execve"):
        assert execute(*RUN, "--", *PYTHON, "-c", program, name).output == f"{name}\n"


# --- the table on the page ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cells() -> Iterator[Mapping[Cell, Future[str]]]:
    """The cells, which begin in the order of the tests."""
    with running(OFTEN) as cells:
        yield cells


@pytest.mark.parametrize("cell", OFTEN, ids=": ".join)
def test_cell_of_the_page_is_what_happens(cell: Cell, cells: Mapping[Cell, Future[str]]) -> None:
    """Run `python -m tests.generate launchers` if this fails, and review the changes."""
    assert cells[cell].result() == documented()[cell]


def test_agents_are_unlimited_only_where_nothing_of_ours_runs() -> None:
    """Everywhere else they are limited, or a message reports that they are not."""
    unlimited = {cell for cell, text in documented().items() if text == NOT_LIMITED}
    assert unlimited == NOTHING_RUNS


def test_often_run_cells_cover_programs_ways_and_outcomes() -> None:
    """The other cells are run at night."""
    assert {launcher for launcher, _ in OFTEN} == set(COMMANDS) - {"workers of `celery`"}
    assert {way for _, way in OFTEN} == set(WAYS)
    page = documented()
    assert {page[cell] for cell in OFTEN} == set(page.values())
