"""The same for PostgreSQL: killed, hung, slow and read-only under load."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.drills.checking import prove
from tests.drills.load import Place, working
from tests.ledger.fixtures import eventually
from tests.postgresql import Server, running

DATABASE = "drill"
TABLES = "SELECT to_regclass('otel_limits_model_calls')::text"


def disasters(directory: Path, size: int) -> str:
    """All of them in sequence, over one load of four processes."""
    with running() as server:
        server.ask("postgres", f"CREATE DATABASE {DATABASE}")
        place = Place(directory, server.url(DATABASE))
        results = []
        with working(place, 4) as workers:
            # On a busy machine invocations return earlier, as their rows wait in files.
            eventually(lambda: server.ask(DATABASE, TABLES) != [(None,)])
            for worker in workers:
                worker.await_more(size)
            for disaster in (slow, read_only, hung, killed):
                with disaster(server):
                    began = time.monotonic()
                    for worker in workers:
                        worker.await_more(size)
                    took = time.monotonic() - began
                for worker in workers:
                    worker.await_more(1)
                results.append(f"{disaster.__name__} {took:.1f} s")
            returned = sum(len(each.returned) for each in workers)
        said = prove(place, returned)
    return f"{said.calls} calls, {said.waiting} rows waited; {', '.join(results)}"


@contextmanager
def slow(server: Server) -> Iterator[None]:
    """Every insertion of calls takes longer than an agent waits."""
    server.ask(
        DATABASE,
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_sleep(0.2); RETURN NULL; END $$; "
        "CREATE TRIGGER wait AFTER INSERT ON otel_limits_model_calls "
        "FOR EACH STATEMENT EXECUTE FUNCTION wait()",
    )
    yield
    server.ask(DATABASE, "DROP TRIGGER wait ON otel_limits_model_calls")


@contextmanager
def read_only(server: Server) -> Iterator[None]:
    """Like a standby, or a server with a full disk."""
    end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'drill'"
    server.ask("postgres", f"ALTER DATABASE {DATABASE} SET default_transaction_read_only = on")
    server.ask("postgres", end)
    yield
    server.ask("postgres", f"ALTER DATABASE {DATABASE} RESET default_transaction_read_only")
    server.ask("postgres", end)


@contextmanager
def hung(server: Server) -> Iterator[None]:
    """Its connections stay open without replies."""
    leader = int((server.data / "postmaster.pid").read_text(encoding="ascii").split()[0])
    children = Path(f"/proc/{leader}/task/{leader}/children").read_text(encoding="ascii").split()
    pids = [leader, *map(int, children)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def killed(server: Server) -> Iterator[None]:
    """It is killed, and restarted later."""
    server.stop()
    yield
    server.start()
