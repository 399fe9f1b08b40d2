"""The cap holds in every kind of worker, however the program that has them is started."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from otel_limits.top.scrapes import samples_of
from tests.launching import (
    BIN,
    INSTRUMENT,
    NO_EXPORT,
    RUN,
    WITHOUT_EXPORTER,
    execute,
    fresh_environment,
)
from tests.paths import SCRIPTS
from tests.processes import PATIENCE_SECONDS, free_port, tied
from tests.programs.runtime.test_autoload import CAP, Environment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CHILDREN = str(SCRIPTS / "children.py")
HALTED = {"model_calls": 3, "stop_reason": "max_turns"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment that autoloads."""
    made = Environment(tmp_path_factory.mktemp("environment"))
    assert made.autoload("install").status == 0
    return made


WAYS = ("run", "run, instrument", "autoload", "autoload, instrument")


def command(way: str, environment: Environment) -> list[str]:
    """Return the command before a module or a script."""
    front = {
        "run": RUN,
        "run, instrument": (*RUN, "--", *INSTRUMENT),
        "autoload": (),
        "autoload, instrument": INSTRUMENT,
    }[way]
    return [*front, environment.python if "autoload" in way else sys.executable]


# --- processes of the standard library ------------------------------------------------------------


METHODS = ("fork", "spawn", "forkserver")


# All ways with all methods are run at night, as are agents of another framework.
@pytest.mark.parametrize(
    ("way", "methods", "agents"),
    [
        ("run", METHODS, "strands"),
        ("run, instrument", ["spawn"], "strands"),
        ("autoload", ["forkserver"], "strands"),
        ("autoload, instrument", ["fork"], "strands"),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_the_cap_holds_in_children(
    way: str, methods: Sequence[str], agents: str, environment: Environment
) -> None:
    """Also where OpenTelemetry fails, whose `sitecustomize` children find first."""
    capped_in_children(way, methods, agents, environment)


def capped_in_children(
    way: str, methods: Sequence[str], agents: str, environment: Environment
) -> None:
    """Run agents in children."""
    front = command(way, environment)
    variables = {**CAP, **WITHOUT_EXPORTER, "AGENTS_BY": agents}
    ended = execute(*front, CHILDREN, *methods, "--preload", **variables)
    assert json.loads(ended.output) == {method: [HALTED, HALTED] for method in methods}


# --- servers --------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(words: Sequence[str], **variables: str) -> Iterator[None]:
    """Start a server, and end it afterwards."""
    with subprocess.Popen(
        tied(*words, signal="TERM"),  # it ends its workers
        env=fresh_environment(**CAP, **variables),
        cwd=SCRIPTS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        alarm = threading.Timer(PATIENCE_SECONDS, process.kill)
        alarm.start()
        try:
            yield
        finally:
            process.terminate()
            log, _ = process.communicate(timeout=PATIENCE_SECONDS)
            alarm.cancel()
            sys.stdout.write(log)


def ask(port: int, path: str = "") -> object:
    """Send a request to a server once it answers, and return its JSON."""
    return json.loads(answer(port, path))


def answer(port: int, path: str = "") -> str:
    """Send a request to a server once it answers."""
    pause = threading.Event()
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        try:
            with urlopen(f"http://127.0.0.1:{port}/{path}", timeout=PATIENCE_SECONDS) as page:
                return str(page.read().decode())
        except (URLError, ConnectionError):  # noqa: PERF203  it is not up yet
            pause.wait(0.1)
    raise AssertionError("it does not answer")


SERVERS = {
    "gunicorn": ("gunicorn", "served:wsgi", "--workers=2", "--bind=127.0.0.1:{port}"),
    "gunicorn, preloaded": (
        *("gunicorn", "served:wsgi", "--workers=2", "--preload", "--bind=127.0.0.1:{port}"),
    ),
    # Uvicorn ends a worker that does not answer within 5 seconds of its start, and OpenTelemetry
    # imports every library of this environment that it can instrument.
    "uvicorn": (
        *("uvicorn", "served:asgi", "--workers=2", "--port={port}"),
        "--timeout-worker-healthcheck=60",
    ),
}


# Each way alone is a column of the matrix in tests/matrix.py, and run at night, as other pairs are.
@pytest.mark.parametrize(
    ("way", "server"),
    [
        ("run, instrument", "gunicorn"),
        ("autoload, instrument", "gunicorn, preloaded"),
        ("run, instrument", "uvicorn"),
    ],
)
def test_the_cap_holds_in_workers_of_servers(
    way: str, server: str, environment: Environment
) -> None:
    """Each worker is limited by itself."""
    capped_in_workers(way, server, environment)


def capped_in_workers(way: str, server: str, environment: Environment) -> None:
    """Call agents of a server."""
    port = free_port()
    words = [word.format(port=port) for word in SERVERS[server]]
    front = command(way, environment)
    with served([*front, "-m", *words], **NO_EXPORT):
        assert [ask(port) for _ in range(3)] == [HALTED] * 3


@pytest.mark.parametrize(("application", "is_reported"), [("asgi", False), ("idle", True)])
def test_supervisor_of_uvicorn_reports_that_no_worker_called_an_agent(
    application: str, *, is_reported: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """It never calls one itself, and its workers end before it."""
    port = free_port()
    front = (*RUN, "--", sys.executable, "-m", "uvicorn", f"served:{application}")
    with served([*front, "--workers=2", f"--port={port}"], OTEL_LIMITS_QUIET="false"):
        ask(port)
    assert ("no agent ran in this process" in capsys.readouterr().out) is is_reported


def test_metrics_are_served_while_workers_are_replaced(tmp_path: Path) -> None:
    """Before the first request, and after each, although it ends the only worker."""
    port, metrics_port = free_port(), free_port()
    words = ("-m", "gunicorn", "served_late:wsgi", "--workers=1", "--max-requests=1")
    front = (*RUN, "--prometheus-port", str(metrics_port), "--", sys.executable)
    shared = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    with served([*front, *words, f"--bind=127.0.0.1:{port}"], **shared):
        scraped = answer(metrics_port, "metrics")
        assert "otel_limits_stops_total{" not in scraped
        for number in (1, 2):
            assert ask(port) == HALTED
            # Without another try: a scrape that fails is an alert.
            with urlopen(f"http://127.0.0.1:{metrics_port}/metrics") as page:
                counted = samples_of(page.read().decode(), is_openmetrics=False)
            stops = [each.value for each in counted if each.name == "otel_limits_stops_total"]
            assert sum(stops) == number


def test_the_cap_holds_in_workers_of_celery(environment: Environment) -> None:
    """In the processes that it forks, and in their children."""
    words = ("-m", "celery", "--workdir", str(SCRIPTS), "-A", "queued", "-q", "worker")
    front = command("run, instrument", environment)
    ended = execute(*front, *words, "--pool=prefork", "--concurrency=1", **CAP, **NO_EXPORT)
    (told,) = (line for line in ended.output.splitlines() if line.startswith("{"))
    assert json.loads(told) == {"own": 3, "child": 3}


def test_a_console_script_of_a_server_is_limited_too() -> None:
    """As most would start it."""
    capped_by_console_script("strands")


def capped_by_console_script(agents: str) -> None:
    """Call an agent of a server that is started by its console script."""
    port = free_port()
    words = ("gunicorn", "served:wsgi", "--workers=1", f"--bind=127.0.0.1:{port}")
    with served([*RUN, "--", str(BIN / words[0]), *words[1:]], AGENTS_BY=agents):
        assert ask(port) == HALTED
