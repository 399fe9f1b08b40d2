"""Store deployments: a single server, with TLS and an ACL, in a cluster, or with Sentinels.

A faulty proxy connects the fleet to each server.
"""

from __future__ import annotations

import re
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from otel_limits.quotas.redis_scripts import KeyNames
from otel_limits.quotas.redis_store import needed
from tests.processes import free_port, tied
from tests.quotas.fixtures import Server, Wire, eventually, require_program

USER: Final = "agents:hunter2"
"""The user with the documented rights, where there is an ACL."""

WATCH: Final = "watch"
"""The password of a Sentinel, if it has one."""

MASTERS: Final = 3
"""The minimum number that can agree that one of them is dead."""

NODE_TIMEOUT: Final = "1000"
"""Milliseconds after which a cluster, or Sentinels, treat a silent server as dead."""


@dataclass
class Deployment:
    """The store of a fleet."""

    url: str
    servers: list[Server]
    """The first has the keys; the last is its replica, if there is one."""
    has_replica: bool = False
    faults: deque[str] = field(default_factory=deque)
    """Faults of the next replies to scripts, from any server."""
    wires: list[Wire] = field(default_factory=list)
    """Proxies of the servers, if there are any."""

    @property
    def keepers(self) -> list[Server]:
        """The servers that can have the keys."""
        return [self.servers[0], *self.servers[-1:]] if self.has_replica else self.servers

    @property
    def running(self) -> list[Server]:
        """Those that were not stopped."""
        return [each for each in self.keepers if each.is_running]

    @property
    def master(self) -> Server:
        """The server that has the keys, once its replica follows it."""
        found: list[Server] = []

        def is_settled() -> bool:
            told = [(each, each.client.info("replication")) for each in self.running]
            found[:] = [each for each, info in told if info["role"] == "master"]
            linked = [info.get("master_link_status") == "up" for _, info in told]
            return len(found) == 1 and sum(linked) == len(told) - 1

        eventually(is_settled)
        return found[0]

    def freeze(self) -> None:
        """Let no server answer, until it is restarted."""
        for each in self.servers:
            each.freeze()

    def stop(self) -> None:
        """Kill the servers that can have the keys."""
        for each in self.keepers:
            each.stop()

    def start(self, *options: str) -> None:
        """Start them again, with more options."""
        for each in self.keepers:
            each.start(*options, "--user", *rights())
        for each in self.servers:
            each.thaw()


def certify(directory: Path) -> Path:
    """Create a self-signed certificate for this machine, next to its key."""
    path = directory / "server.crt"
    require_program("openssl")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-out", str(path), "-keyout", str(path.with_suffix(".key"))]
    subprocess.run(command, check=True, capture_output=True)
    return path


def encrypted(certificate: Path) -> list[str]:
    """Return the options of a server with this certificate."""
    options = ["--tls-auth-clients", "no", "--tls-cert-file", str(certificate)]
    options += ["--tls-key-file", str(certificate.with_suffix(".key"))]
    return [*options, "--tls-ca-cert-file", str(certificate)]


def rights() -> list[str]:
    """Return the user with the documented rights, and no others, as a server's option."""
    name, password = USER.split(":")
    # A cluster client needs the last two in addition.
    extra = ("+cluster|slots", "+command")
    return [name, "on", f">{password}", *needed(KeyNames()).split(), *extra]


def admit_agents(server: Server) -> None:
    """Add the user with the documented rights to a running server."""
    name, *rules = rights()
    server.client.execute_command("ACL", "SETUSER", name, "reset", *rules)


@contextmanager
def alone(directory: Path) -> Iterator[Deployment]:
    """One server."""
    with ExitStack() as stack:
        server = _started(stack, Server(directory))
        deployment = Deployment("", [server])
        wire = _wired(stack, deployment, server.port)
        deployment.url = f"redis://127.0.0.1:{wire.port}/0"
        yield deployment


@contextmanager
def guarded(directory: Path) -> Iterator[Deployment]:
    """One server, over TLS, with a user of the documented rights."""
    certificate, port = certify(directory), free_port()
    with ExitStack() as stack:
        options = [*encrypted(certificate), "--tls-port", str(port)]
        server = _started(stack, Server(directory, *options))
        admit_agents(server)
        deployment = Deployment("", [server])
        # Replies to scripts cannot be recognized in encrypted traffic.
        wire = _wired(stack, deployment, port, re.compile(b""))
        deployment.url = f"rediss://{USER}@127.0.0.1:{wire.port}/0?ssl_ca_certs={certificate}"
        yield deployment


@contextmanager
def cluster(directory: Path, *, has_wires: bool = True) -> Iterator[Deployment]:
    """Three masters, the first of which has our keys and a replica."""
    with ExitStack() as stack:
        deployment = Deployment("", [], has_replica=True)
        seeds = []
        for number in range(MASTERS + 1):
            folder, port, bus = directory / f"node-{number}", free_port(), str(free_port())
            folder.mkdir()
            shown = _wired(stack, deployment, port).port if has_wires else port
            options = ["--cluster-enabled", "yes", "--cluster-port", bus]
            options += ["--cluster-announce-ip", "127.0.0.1", "--cluster-announce-port", str(shown)]
            options += ["--cluster-announce-bus-port", bus, "--cluster-node-timeout", NODE_TIMEOUT]
            node = _started(stack, Server(folder, *options, port=port))
            admit_agents(node)
            deployment.servers.append(node)
            seeds.append(f"127.0.0.1:{shown}")
            if number:
                first = deployment.servers[0].client
                first.execute_command("CLUSTER MEET", "127.0.0.1", port, bus)
        _form(deployment.servers)
        # Only some of them can be killed.
        deployment.url = f"redis+cluster://{USER}@{','.join(seeds[:2])}"
        yield deployment


def _form(nodes: list[Server]) -> None:
    """Give each master its slots, nearly all to the first, and the first its replica."""
    *masters, replica = nodes
    for node, slots in zip(masters, ((0, 16000), (16001, 16100), (16101, 16383)), strict=True):
        node.client.execute_command("CLUSTER ADDSLOTSRANGE", *slots)
    eventually(lambda: all(len(node.client.cluster("NODES")) == len(nodes) for node in nodes))
    name = nodes[0].client.execute_command("CLUSTER MYID")
    replica.client.execute_command("CLUSTER REPLICATE", name)
    _await_link(replica)
    state = "cluster_state"
    eventually(lambda: all(node.client.cluster("INFO")[state] == "ok" for node in nodes))


@contextmanager
def sentinel(directory: Path, *, has_wires: bool = True) -> Iterator[Deployment]:
    """A master, its replica, and a Sentinel that promotes the replica; with ACL users."""
    with ExitStack() as stack:
        deployment = Deployment("", [], has_replica=True)
        shown = []
        for name in ("master", "replica"):
            (directory / name).mkdir()
            port = free_port()
            shown.append(_wired(stack, deployment, port).port if has_wires else port)
            announce = ["--replica-announce-ip", "127.0.0.1"]
            announce += ["--replica-announce-port", str(shown[-1])]
            deployment.servers.append(
                _started(stack, Server(directory / name, *announce, port=port))
            )
            admit_agents(deployment.servers[-1])
        master, replica = deployment.servers
        replica.client.replicaof("127.0.0.1", master.port)
        _await_link(replica)
        port = _watch(stack, directory, shown[0])
        deployment.url = f"redis+sentinel://{USER}@127.0.0.1:{port}/fleet"
        yield deployment


@contextmanager
def guarded_sentinel(directory: Path) -> Iterator[Deployment]:
    """The same over TLS only, with a separate password for the Sentinel; without proxies.

    Replication uses the same connections as the fleet, and encrypted traffic looks alike.
    """
    certificate, ports = certify(directory), (free_port(), free_port())
    tls = [*encrypted(certificate), "--tls-replication", "yes"]
    with ExitStack() as stack:
        deployment = Deployment("", [], has_replica=True)
        for name, port in zip(("master", "replica"), ports, strict=True):
            (directory / name).mkdir()
            options = [*tls, "--tls-port", str(port)]
            deployment.servers.append(_started(stack, Server(directory / name, *options)))
            admit_agents(deployment.servers[-1])
        replica = deployment.servers[1]
        replica.client.replicaof("127.0.0.1", ports[0])
        _await_link(replica)
        watching = free_port()
        _watch(stack, directory, ports[0], *tls, "--tls-port", str(watching), password=WATCH)
        options_of_url = f"tls=true&sentinel_password={WATCH}&ssl_ca_certs={certificate}"
        deployment.url = f"redis+sentinel://{USER}@127.0.0.1:{watching}/fleet?{options_of_url}"
        yield deployment


def _watch(
    stack: ExitStack, directory: Path, master: int, *options: str, password: str = ""
) -> int:
    """Start a Sentinel; returns its port once it knows the replica."""
    port, settings = free_port(), directory / "sentinel.conf"
    settings.write_text(
        f"sentinel monitor fleet 127.0.0.1 {master} 1\n"
        f"sentinel down-after-milliseconds fleet {NODE_TIMEOUT}\n"
        "sentinel failover-timeout fleet 3000\n"
    )
    if password:
        settings.write_text(f"{settings.read_text()}requirepass {password}\n")
    command = ["redis-server", str(settings), "--sentinel", "--port", str(port), *options]
    watcher = stack.enter_context(subprocess.Popen(tied(*command), stdout=subprocess.DEVNULL))
    stack.callback(watcher.kill)
    asked = Server(directory, port=port)
    if password:
        asked.client.connection_pool.connection_kwargs["password"] = password
    asked.wait()
    eventually(lambda: asked.client.sentinel_masters()["fleet"]["num-slaves"] == 1)
    asked.client.close()
    return port


def _started(stack: ExitStack, server: Server) -> Server:
    server.start()
    stack.callback(server.stop)
    return server


def _wired(
    stack: ExitStack, deployment: Deployment, port: int, spoiled: re.Pattern[bytes] | None = None
) -> Wire:
    wire = Wire(port) if spoiled is None else Wire(port, spoiled)
    stack.callback(wire.close)
    wire.faults = deployment.faults
    deployment.wires.append(wire)
    return wire


def _await_link(replica: Server) -> None:
    eventually(lambda: replica.client.info("replication")["master_link_status"] == "up")


DEPLOYMENTS: Final[dict[str, Callable[[Path], AbstractContextManager[Deployment]]]] = {
    "alone": alone,
    "guarded": guarded,
    "cluster": cluster,
    "sentinel": sentinel,
    "guarded-sentinel": guarded_sentinel,
}
