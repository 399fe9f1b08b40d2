"""A ledger behind PgBouncer, which runs each transaction in any session of the server."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from otel_limits.cli import main
from otel_limits.ledger.address import parse
from otel_limits.ledger.database import Database
from tests.ledger.book import DAY, NINE, Call, Entry, write
from tests.ledger.fixtures import eventually
from tests.postgresql import OWNER, PROGRAMS, Server
from tests.processes import PATIENCE_SECONDS, free_port, tied
from tests.servers.ledger.test_database import QUESTIONS, answer
from tests.unit.ledger.test_spill import check_equivalence
from tests.unit.ledger.test_writer import rows_of

PGBOUNCER = shutil.which("pgbouncer") or shutil.which("/usr/sbin/pgbouncer")

pytestmark = pytest.mark.skipif(
    not (PROGRAMS and PGBOUNCER) and os.environ.get("CI") != "true",
    reason="PostgreSQL or PgBouncer is missing: apt-get install postgresql pgbouncer.",
)


class Pooler:
    """PgBouncer in front of a server, with two sessions for each database."""

    def __init__(self, server: Server, directory: Path) -> None:
        assert PGBOUNCER, "CI needs pgbouncer"
        self.server = server
        self.port = free_port()
        self.settings = directory / "pgbouncer.ini"
        self.settings.write_text(
            f"""
            [databases]
            * = host=127.0.0.1 port={server.port} user=auditor
            [pgbouncer]
            listen_addr = 127.0.0.1
            listen_port = {self.port}
            unix_socket_dir =
            auth_type = any
            pool_mode = transaction
            default_pool_size = 2
            """.replace("    ", ""),
            encoding="utf-8",
        )

    def url(self, database: str) -> str:
        """The address of a database."""
        return f"postgresql://auditor@127.0.0.1:{self.port}/{database}"

    @contextmanager
    def running(self) -> Iterator[Pooler]:
        """Run it until the end."""
        command = tied(str(PGBOUNCER), str(self.settings), user=OWNER)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            eventually(self._answers)
            yield self
        finally:
            process.terminate()
            process.wait(PATIENCE_SECONDS)

    def _answers(self) -> bool:
        with suppress(psycopg.OperationalError), self.connected("postgres"):
            return True
        return False

    def connected(self, database: str) -> psycopg.Connection:
        """Connect without any of our code."""
        return psycopg.connect(self.url(database), prepare_threshold=None)


@pytest.fixture(scope="module")
def pooler(postgresql: Server) -> Iterator[Pooler]:
    """A running pooler in front of the shared server."""
    with Pooler(postgresql, postgresql.data.parent).running() as pooler:
        yield pooler


@pytest.fixture
def database(
    pooler: Pooler,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> str:
    """An empty database; rows would wait in the test's own directory."""
    name = f"t{abs(hash(request.node.nodeid))}"
    pooler.server.ask("postgres", f"CREATE DATABASE {name}")
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", pooler.url(name))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    return name


@pytest.mark.parametrize("parameters", ["", "?prepare_threshold=0"])
def test_writers_behind_a_pooler_share_its_sessions(
    pooler: Pooler, database: str, tmp_path: Path, parameters: str
) -> None:
    """More writers than sessions: a statement prepared by one would be missing in another."""
    address = parse("test", pooler.url(database) + parameters, tmp_path / "data")
    with ExitStack() as stack:
        writers = [stack.enter_context(closing(Database(address))) for _ in range(3)]
        for number in range(30):
            writers[number % 3].write(rows_of(f"{number}"))
    counted = pooler.server.ask(database, "SELECT count(*) FROM otel_limits_attributes")
    assert counted == [(30,)]


def test_writer_behind_a_pooler_leaves_no_statement_in_a_session(
    pooler: Pooler, database: str, tmp_path: Path
) -> None:
    """Another client gets the same session, and its names would collide."""
    with closing(Database(parse("test", pooler.url(database), tmp_path))) as opened:
        for number in range(20):
            opened.write(rows_of(f"{number}"))
    with pooler.connected(database) as connection:
        found = connection.execute("SELECT name FROM pg_prepared_statements").fetchall()
        shown = connection.execute("SHOW statement_timeout").fetchone()
    assert (found, shown) == ([], ("0",))


def test_every_question_has_the_same_answer_behind_a_pooler(
    pooler: Pooler, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Queries use temporary tables, one state of all rows and cursors, each in one transaction."""
    entries = [
        Entry(
            agent=f"agent-{n % 3}",
            calls=[Call(price="0.01", tools=("search",))] * (n % 4 + 1),
            attributes={"tenant.id": "acme"},
            at=NINE + n * DAY / 2,
        )
        for n in range(40)
    ]
    places = (pooler.server.url(database), pooler.url(database))
    write(parse("test", places[1], tmp_path / "data"), *entries)
    for question in QUESTIONS:
        direct, pooled = (answer(capsys, place, *question) for place in places)
        assert direct == pooled, question


@pytest.mark.parametrize("encoding", ["UTF8", "LATIN1"])
def test_waiting_rows_are_seen_behind_a_pooler(
    pooler: Pooler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """They are taken in, and no temporary table is left in a session that others use."""
    as_it_is = "LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
    name = f"waiting_{encoding.lower()}"
    pooler.server.ask("postgres", f"CREATE DATABASE {name} ENCODING '{encoding}' {as_it_is}")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    check_equivalence(parse("test", pooler.url(name), tmp_path / "data"), 0)
    left = "SELECT relname FROM pg_class WHERE relpersistence = 't'"
    with pooler.connected(name) as connection:
        assert connection.execute(left).fetchall() == []


COMMANDS: tuple[list[str], ...] = (
    ["check"],
    ["ledger", "reprice"],
    ["ledger", "end-lost", "--older-than", "1d"],
    ["ledger", "close", "--until", "2025-11-01"],
    ["ledger", "export", "--format", "csv"],
    ["ledger", "prune", "--older-than", "1d", "--full"],
    ["audit", "verify"],
)


@pytest.mark.usefixtures("database")
def test_commands_run_behind_a_pooler(
    pooler: Pooler, tmp_path: Path, capsys: pytest.CaptureFixture[str], database: str
) -> None:
    """Advisory locks and timeouts end with their transaction; VACUUM needs none."""
    other = tmp_path / "other.db"
    write(parse("test", str(other), tmp_path / "data"), Entry(), Entry(agent="second"))
    commands: list[list[Any]] = [["ledger", "merge", str(other), "--into", pooler.url(database)]]
    for command in [*commands, *COMMANDS]:
        assert main(command) == 0, (command, capsys.readouterr())
