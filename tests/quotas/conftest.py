"""A real redis-server on a free port, and what can go wrong between it and us."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Protocol

import pytest
import redis

import otel_limits
from otel_limits.quotas import setup
from otel_limits.quotas.redis_store import RedisStore

STARTUP_SECONDS = 10.0


def free_port() -> int:
    """Return a port that nobody listens on."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Server:
    """One redis-server, which a test may stop, freeze and start again."""

    def __init__(self, folder: Path, *options: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def client(self) -> Any:
        """A client for looking into it."""
        return redis.Redis(port=self.port, decode_responses=True)

    def start(self) -> None:
        """Start it empty, on the same port as before."""
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--dir", str(self._folder), "--daemonize", "no", *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        give_up = time.monotonic() + STARTUP_SECONDS
        while not self._answers():
            assert self._process.poll() is None, "redis-server ended at once"
            assert time.monotonic() < give_up, "redis-server does not answer"

    def stop(self) -> None:
        """End it at once, so that it forgets everything."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()

    def freeze(self) -> None:
        """Keep its connections open and answer nothing."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Go on from there."""
        self._signal(signal.SIGCONT)

    def calls(self, command: str = "evalsha") -> int:
        """Return how often a command was called."""
        statistics = self.client.info("commandstats")
        return int(statistics.get(f"cmdstat_{command}", {}).get("calls", 0))

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False


class Wire:
    """Stands between a client and a server: delays replies, or cuts instead of passing one on."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.delay = 0.0
        self.cuts = 0
        """Replies that are yet to be swallowed, each with its connection."""
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"redis://127.0.0.1:{self.port}/0"

    def close(self) -> None:
        """Let no one in any more."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            for carry in (self._carry_requests, self._carry_replies):
                threading.Thread(target=carry, args=(client, server), daemon=True).start()

    def _carry_requests(self, client: socket.socket, server: socket.socket) -> None:
        self._carry(client, server, lambda data: data)

    def _carry_replies(self, client: socket.socket, server: socket.socket) -> None:
        self._carry(server, client, self._spoil)

    def _spoil(self, data: bytes) -> bytes:
        """Cut a reply to a script: those to the handshake of a connection are let through."""
        is_handshake = data.startswith((b"%", b"+OK", b"*")) or b"NOSCRIPT" in data
        if self.cuts and not is_handshake:
            self.cuts -= 1
            return b""
        threading.Event().wait(self.delay)
        return data

    def _carry(
        self, source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]
    ) -> None:
        try:
            while data := source.recv(1 << 16):
                changed = change(data)
                if not changed:
                    break
                target.sendall(changed)
        except OSError:
            pass
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="session")
def redis_installed() -> None:
    """Skip where there is no redis-server; in CI that is a failure."""
    if shutil.which("redis-server") is not None:
        return
    sentence = "redis-server is not installed: apt-get install redis-server"
    if os.environ.get("CI") == "true":
        pytest.fail(sentence)
    pytest.skip(sentence)


@pytest.fixture(scope="session")
def shared_server(
    redis_installed: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One server for all tests that leave it running."""
    server = Server(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def server(shared_server: Server) -> Server:
    """The shared server, empty and with nothing counted."""
    client = shared_server.client
    client.flushall()
    client.config_resetstat()
    return shared_server


@pytest.fixture
def own_server(redis_installed: None, tmp_path: Path) -> Iterator[Server]:
    """A server that the test may ill-treat."""
    server = Server(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def wire(server: Server) -> Iterator[Wire]:
    """A wire to the shared server."""
    wire = Wire(server.port)
    yield wire
    wire.close()


@pytest.fixture
def store(server: Server) -> Iterator[RedisStore]:
    """Look at what is counted on the shared server, as the command line does."""
    store = RedisStore(server.url, 1.0)
    yield store
    store.close()


class Hold(Protocol):
    """Switches otel-limits on with quotas."""

    def __call__(
        self,
        quotas: dict[str, dict[str, Any]],
        url: str = "memory://",
        observers: Sequence[Any] = (),
        timeout: float = 20.0,
        **more: Any,
    ) -> None:
        """Hold `quotas`; `more` are other sections of the policy file.

        A crowded machine is no outage, hence the patience.
        """


@pytest.fixture
def hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hold:
    """Switch otel-limits on with quotas; the end of the test switches it off."""

    def switch(
        quotas: dict[str, dict[str, Any]],
        url: str = "memory://",
        observers: Sequence[Any] = (),
        timeout: float = 20.0,
        **more: Any,
    ) -> None:
        monkeypatch.setattr(setup, "TIMEOUT_SECONDS", timeout)
        path = tmp_path / "limits.yaml"
        path.write_text(json.dumps({"quotas": quotas, **more}))
        monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))
        monkeypatch.setenv("OTEL_LIMITS_QUOTA_STORE", url)
        otel_limits.enable(observers=observers)

    return switch
