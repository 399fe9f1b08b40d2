"""A real PostgreSQL server, which tests may stop and restart."""

from __future__ import annotations

import glob
import os
import pwd
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psycopg

from tests.processes import PATIENCE_SECONDS, free_port, tied

PROGRAMS: Final = sorted(glob.glob("/usr/lib/postgresql/*/bin"))  # noqa: PTH207  a pattern of the system

OWNER: Final = "postgres"
"""Runs it if this is root, whom it refuses."""


class Server:
    """A server on a free port of the loopback address; each test creates its own database."""

    def __init__(self, directory: Path) -> None:
        assert PROGRAMS, "CI needs postgresql"
        self.data = directory / "data"
        self.log = directory / "log"
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        create = _command("initdb", "-D", str(self.data), "-U", "auditor", "-A", "trust")
        subprocess.run([*create, "--no-sync"], check=True, stdout=subprocess.DEVNULL, cwd="/")

    def start(self) -> None:
        """Start it, and wait until it answers."""
        settings = ("listen_addresses=127.0.0.1", "fsync=off", "unix_socket_directories=")
        options = (option for setting in settings for option in ("-c", setting))
        command = _command("postgres", "-D", str(self.data), "-p", str(self.port), *options)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/")
        give_up = time.monotonic() + PATIENCE_SECONDS
        while not self._answers():
            failed = self._process.poll() is not None or time.monotonic() > give_up
            assert not failed, self.log.read_text(encoding="utf-8")
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop it immediately."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGQUIT)
            process.wait(PATIENCE_SECONDS)

    def url(self, database: str) -> str:
        """The address of a database."""
        return f"postgresql://auditor@127.0.0.1:{self.port}/{database}"

    def ask(self, database: str, query: str) -> list[tuple[Any, ...]]:
        """Ask without any of our code."""
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(query)
            return cursor.fetchall() if cursor.description else []

    def _answers(self) -> bool:
        with suppress(psycopg.OperationalError):
            return bool(self.ask("postgres", "SELECT 1"))
        return False


def _command(program: str, *arguments: str) -> list[str]:
    # Killed, it would leave its processes and its shared memory.
    return tied(f"{PROGRAMS[-1]}/{program}", *arguments, signal="QUIT", user=OWNER)


@contextmanager
def running() -> Iterator[Server]:
    """Run a server.

    Its directory is not below that of pytest, which only its owner may enter.
    """
    with tempfile.TemporaryDirectory() as directory:
        if os.geteuid() == 0:
            owner = pwd.getpwnam(OWNER)
            os.chown(directory, owner.pw_uid, owner.pw_gid)
        server = Server(Path(directory))
        try:
            server.start()
            yield server
        finally:
            server.stop()
