"""SIGTERM: everything is exported before the process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.launching import BIN, RUN, execute, fresh_environment
from tests.ledger.fixtures import LedgerFile
from tests.otlp.receiver import Received
from tests.paths import SCRIPTS
from tests.processes import bounded, tied
from tests.programs.observers.test_otlp_observer import attributes, over
from tests.unit.ledger.test_writer import restore

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows ends processes without a word.")

STAYING = str(SCRIPTS / "staying.py")
POOLING = str(SCRIPTS / "pools.py")
BY_RUN = (*RUN, "--max-turns", "2", "--", sys.executable, STAYING)
LINE = (
    "from otel_limits.startup import otel_limits_startup as startup; "
    "import runpy, sys; startup.autoload(); "
)
AUTOLOADED = (sys.executable, "-c", f"{LINE}runpy.run_path(sys.argv[1])", STAYING)
"""The line of `otel-limits autoload install`, run in a temporary environment."""


UNSHARED = ("unshare", "--pid", "--fork", "--kill-child")
"""Begins a command that is the first process of its namespace, as in a container."""


@contextmanager
def halted(*command: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """Start a program whose agent was halted, and that has exported nothing yet."""
    process = subprocess.Popen(
        tied(*command),
        env=fresh_environment(**environ),
        cwd=BIN,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with bounded(process):
        assert process.stdout is not None
        assert process.stdout.readline() == "max_turns\n"
        yield process


def export_to(endpoint: str, protocol: str = "http/protobuf") -> dict[str, str]:
    """Variables that have telemetry sent, and nothing before a minute has passed."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_METRIC_EXPORT_INTERVAL": "60000",
        "OTEL_BSP_SCHEDULE_DELAY": "60000",
        "OTEL_BLRP_SCHEDULE_DELAY": "60000",
    }


def stops(received: Received) -> Any:
    """Halts at max_turns by the metrics that arrived."""
    metric = received.metrics.get("otel_limits.stops")
    points: Any = metric.sum.data_points if metric is not None else ()
    return sum(
        point.as_int or point.as_double
        for point in points
        if attributes(point)["reason"] == "max_turns"
    )


def arrived(received: Received) -> dict[str, Any]:
    """The exports about the halt, by signal."""
    return {
        "metrics": stops(received),
        "logs": [each.event_name for each in received.logs],
        "spans": [each.name for each in received.spans if each.name.startswith("invoke_agent")],
    }


ALL = {"metrics": 1, "logs": ["otel_limits.halt"], "spans": ["invoke_agent researcher"]}


@pytest.mark.parametrize(
    ("protocol", "command", "environ"),
    [
        ("grpc", BY_RUN, {}),
        ("http/protobuf", (*BY_RUN, "--asyncio"), {}),
        ("http/protobuf", AUTOLOADED, {"OTEL_LIMITS_MAX_TURNS": "2"}),
    ],
    ids=["run", "run in an event loop", "autoload"],
)
def test_a_halt_arrives_although_the_process_is_ended(
    protocol: str, command: tuple[str, ...], environ: dict[str, str]
) -> None:
    """Metrics, logs and spans, before the next interval; and the process dies of the signal."""
    received = Received()
    with over(protocol, received) as endpoint:
        with halted(*command, **export_to(endpoint, protocol), **environ) as process:
            process.send_signal(signal.SIGTERM)
        assert process.returncode == -signal.SIGTERM
        assert arrived(received) == ALL


@pytest.mark.skipif(
    subprocess.run([*UNSHARED, "true"], capture_output=True, check=False).returncode != 0,
    reason="Only root can make a namespace of processes.",
)
def test_the_first_process_of_a_container_ends_as_well(tmp_path: Path) -> None:
    """Linux does not deliver an unhandled signal to PID 1: it would stay until it is killed."""
    ledger = LedgerFile(tmp_path / "ledger.db")
    environ = {"OTEL_LIMITS_LEDGER": str(ledger.path), "OTEL_LIMITS_LEDGER_SYNC": "background"}
    with halted(*UNSHARED, *BY_RUN, **environ) as process:
        (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    restore(ledger)
    (row,) = ledger.invocations()
    assert row["reason"] == "max_turns"


def test_spans_of_a_provider_that_the_program_set_arrive_too() -> None:
    """The halt is on them, with any exporter."""
    received = Received()
    with over("http/protobuf", received) as endpoint:
        with halted(*BY_RUN, "--own-export", **export_to(endpoint)) as process:
            process.send_signal(signal.SIGTERM)
        assert process.returncode == -signal.SIGTERM
        assert arrived(received) == ALL


def test_rows_of_the_ledger_are_not_lost(tmp_path: Path) -> None:
    """Including those without a caller that waits for them."""
    ledger = LedgerFile(tmp_path / "ledger.db")
    environ = {"OTEL_LIMITS_LEDGER": str(ledger.path), "OTEL_LIMITS_LEDGER_SYNC": "background"}
    with halted(*BY_RUN, **environ) as process:
        process.send_signal(signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM
    restore(ledger)  # a machine under load has not made the database within a second
    (row,) = ledger.invocations()
    assert (row["reason"], row["model_calls"]) == ("max_turns", 2)


TIMEOUT_SECONDS = 4.0


def test_an_endpoint_that_hangs_delays_it_by_one_timeout() -> None:
    """All three signals together, and the status stays that of the signal."""
    with (
        over("grpc", Received("hanging")) as endpoint,
        halted(
            *BY_RUN,
            **export_to(endpoint, "grpc"),
            OTEL_EXPORTER_OTLP_TIMEOUT=str(TIMEOUT_SECONDS),
        ) as process,
    ):
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
    # Two signals, one after the other, would take as long as that.
    assert time.monotonic() - begin < 2 * TIMEOUT_SECONDS


def test_second_signal_ends_immediately() -> None:
    """A second signal means that the sender does not want to wait for the endpoint."""
    received = Received("hanging")
    with (
        over("http/protobuf", received) as endpoint,
        halted(*BY_RUN, **export_to(endpoint), OTEL_EXPORTER_OTLP_TIMEOUT="30") as process,
    ):
        process.send_signal(signal.SIGTERM)
        assert received.sent_spans.wait(20)
        process.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        assert process.wait() == -signal.SIGTERM
        assert time.monotonic() - begin < 25  # of the 30 that the endpoint would have


def test_a_program_with_a_handler_keeps_it() -> None:
    """It ends in its own way, after `otel_limits.flush()` has exported everything."""
    received = Received()
    with over("http/protobuf", received) as endpoint:
        with halted(*BY_RUN, "--own-handler", **export_to(endpoint)) as process:
            process.send_signal(signal.SIGTERM)
            assert process.stdout is not None
            assert process.stdout.read() == "True\n"
        assert process.returncode == 3
        assert arrived(received) == ALL


POOLS = (*RUN, "--max-turns", "2", "--", sys.executable, "-W", "ignore", POOLING)


def test_pools_without_agents_end() -> None:
    """A worker that misses the signal would keep its program waiting forever.

    With a handler of Python in the workers, one in twenty pools hangs.
    """
    assert execute(*POOLS, "60").output == "ended\n"


def test_pool_ends_after_its_workers_have_exported() -> None:
    """They called agents, and what they measured must not depend on how a pool ends."""
    received = Received()
    with over("http/protobuf", received) as endpoint:
        assert execute(*POOLS, "2", "agents", **export_to(endpoint)).output == "ended\n"
        names = [span.name for span in received.spans]
        assert (names.count("invoke_agent Strands Agents"), len(received.logs)) == (2, 2)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_child_that_waits_in_c_ends_after_its_export(method: str) -> None:
    """Python runs no handler there, and the default action would end it."""
    received = Received()
    with over("http/protobuf", received) as endpoint:
        command = (*POOLS, "stuck", method)
        assert execute(*command, **export_to(endpoint)).output == f"{-signal.SIGTERM}\n"
        names = [span.name for span in received.spans]
        assert (names.count("invoke_agent Strands Agents"), len(received.logs)) == (1, 1)


OWN_HANDLER = """
import multiprocessing, signal, sys
import strands
def work(is_ready):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    is_ready.set()
    signal.pause()
context = multiprocessing.get_context("fork")
is_ready = context.Event()
child = context.Process(target=work, args=(is_ready,))
child.start()
is_ready.wait()
child.terminate()
child.join()
print(child.exitcode)
"""


def test_child_with_a_handler_keeps_it() -> None:
    """It decides when the child ends."""
    ended = execute(*RUN, "--max-turns", "2", "--", sys.executable, "-Wignore", "-c", OWN_HANDLER)
    assert ended.output == "3\n"


WITHOUT_THREADS = """
import os, resource, signal, threading, time
import strands
threading.stack_size(1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


def test_process_without_memory_for_a_thread_ends() -> None:
    """Nothing can be flushed, but a signal that ends a process must end it."""
    ended = execute(*RUN, "--max-turns", "2", "--", sys.executable, "-c", WITHOUT_THREADS)
    assert ended.status == -signal.SIGTERM
