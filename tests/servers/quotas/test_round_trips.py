"""The cost of quotas: round trips, threads, forks; and every supported kind of server."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis

import otel_limits
from otel_limits import ConfigurationError, QuotaUnavailableError, disable, enable
from otel_limits.core.events import QuotaUse
from otel_limits.quotas import setup
from otel_limits.quotas.keys import Template
from otel_limits.quotas.redis_scripts import KeyNames
from otel_limits.quotas.redis_store import RedisStore
from otel_limits.quotas.store import (
    Count,
    CountState,
    Grant,
    Renew,
    Reserve,
    Settle,
    SharedStore,
    StoreError,
    StorePlace,
)
from otel_limits.quotas.stores import open_shared_store
from otel_limits.quotas.windows import Windows
from otel_limits.runs.registry import LIVE
from otel_limits.settings.settings_reader import read_settings
from otel_limits.testing import ScriptedModel, endless, says, uses
from tests.benchmarks import quotas
from tests.drills import deployments
from tests.processes import free_port, tied
from tests.quotas.fixtures import PATIENCE, Server, Wire, eventually, open_redis

if TYPE_CHECKING:
    from collections.abc import Iterator

    from strands import Agent

    from otel_limits.core.events import Event
    from tests.conftest import Call, MakeAgent
    from tests.drills.deployments import Deployment
    from tests.quotas.fixtures import Hold


# Without grace, so no counts are read in between.
CALLS = {"model_calls": 1000, "window": "month", "grace": 0}
OTHERS = {
    "tokens": {"tokens": 10**9, "window": "day", "key": "agent", "grace": 0},
    "runs": {"invocations": 10**6, "window": "hour", "key": "model", "grace": 0},
    "watched": {"model_calls": 1, "window": "month", "action": "observe", "grace": 0},
}


def this_count(quota: str = "calls") -> Count:
    """The current monthly count of a quota without a key."""
    key = Template("").key(quota, dict[str, object]().get)
    return Count(quota, key.id, Windows("month").at(time.time()), "model_calls", key.shown)


def no_listeners() -> None:
    """Wait until there are no more subscribers to kills."""
    eventually(lambda: "otel-limits-kill" not in {each.name for each in threading.enumerate()})


# --- round trips ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("rare_looks")
@pytest.mark.parametrize("quotas", [{"calls": CALLS}, {"calls": CALLS} | OTHERS], ids=["1", "4"])
def test_a_model_call_costs_two_commands_however_many_quotas_apply(
    hold: Hold,
    make_agent: MakeAgent,
    server: Server,
    call: Call,
    quotas: dict[str, Any],
) -> None:
    """One script reserves from all, one settles all; nothing else is sent."""
    hold(quotas, server.url)
    call(make_agent(ScriptedModel([says("warm")])))
    gate: Any = LIVE.observers.gate
    eventually(lambda: gate.client.fallback.looks > 0)
    server.client.config_resetstat()
    call(make_agent(ScriptedModel([*[uses("search")] * 9, says("done")])))
    sent = server.client.info("commandstats")
    within_scripts = {"get", "set", "time", "hget", "hmget", "hset", "hdel"}
    within_scripts |= {
        "pexpire",
        "pexpireat",
        "pttl",
        "zadd",
        "zcard",
        "zrange",
        "zrem",
        "zrangebyscore",
        "zremrangebyscore",
    }
    commands = {name.removeprefix("cmdstat_"): row["calls"] for name, row in sent.items()}
    assert commands["evalsha"] == 20
    others = {"config|resetstat", "info", "hello", "subscribe", "ping"}  # ours, and for kills
    assert commands.keys() - within_scripts - others == {"evalsha"}


@pytest.mark.usefixtures("rare_looks")
def test_first_call_finds_everything_prepared(
    hold: Hold, make_agent: MakeAgent, server: Server
) -> None:
    """Connection, password, database and scripts: it costs what later calls cost."""
    client = server.client
    client.execute_command("ACL", "SETUSER", "agents", "on", ">pw", "~*", "&*", "+@all")
    hold({"calls": CALLS}, f"redis://agents:pw@127.0.0.1:{server.port}/3")
    gate: Any = LIVE.observers.gate
    eventually(lambda: gate.client.fallback.looks > 0 and client.pubsub_channels())
    eventually(lambda: client.info("commandstats").get("cmdstat_zrangebyscore"))  # no kills
    client.config_resetstat()
    make_agent(ScriptedModel([says("done")]))("go")
    eventually(lambda: server.calls() == 2)
    sent = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    assert sent.isdisjoint({"auth", "hello", "select", "client|setinfo", "script|load"})


@pytest.mark.usefixtures("rare_looks")
def test_call_right_after_enabling_waits_for_few_round_trips(
    hold: Hold, make_agent: MakeAgent, server: Server, wire: Wire
) -> None:
    """Over a slow network it would otherwise miss the timeout: at 250 ms, eight fit."""
    hold({"calls": CALLS}, wire.url, timeout=PATIENCE)  # each timeout adds some
    assert make_agent(ScriptedModel([says("done")]))("go").stop_reason == "end_turn"
    # Two for the client, scripts, run, joining, the call's two, and one for a read in between. The
    # other connections receive messages of the server.
    (trips,) = itertools.compress(wire.round_trips, wire.runs_scripts)
    assert trips <= 8


def test_enabling_does_not_wait_for_the_store(hold: Hold, own_server: Server) -> None:
    """Nor would the application start while the network hangs."""
    own_server.freeze()
    begin = time.monotonic()
    hold({"calls": CALLS}, own_server.url, timeout=PATIENCE)
    assert time.monotonic() - begin < PATIENCE / 2
    own_server.thaw()


def test_a_call_that_no_quota_applies_to_sends_nothing(
    hold: Hold, make_agent: MakeAgent, server: Server
) -> None:
    """Only the process makes itself known, once a second."""
    hold({"nightly": CALLS | {"where": {"agent": "nightly-*"}}}, server.url)
    make_agent(ScriptedModel([uses("search"), says("done")]))("go")
    names = KeyNames()
    assert set(server.client.keys()) <= {names.marker, names.living}


def test_concurrent_agents_share_a_round_trip(
    hold: Hold, make_agent: MakeAgent, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one batch is in flight, the next one fills."""
    hold({"calls": CALLS}, server.url)
    batches: list[int] = []
    run = RedisStore.run

    def count(store: RedisStore, operations: Any) -> Any:
        batches.append(sum(isinstance(each, Reserve | Settle) for each in operations))
        return run(store, operations)

    monkeypatch.setattr(RedisStore, "run", count)

    async def ask() -> None:
        agents = [make_agent(ScriptedModel([says("done")])) for _ in range(50)]
        await asyncio.gather(*(agent.invoke_async("go") for agent in agents))

    asyncio.run(ask())
    # The first ones found an empty batch and were sent alone.
    assert len(batches) < sum(batches) <= 100


def test_disable_during_a_reservation_is_not_an_error(
    hold: Hold, server: Server, wire: Wire
) -> None:
    """Each thread closes its own connections after its reply."""
    wire.delay = 0.2
    hold({"calls": CALLS}, wire.url)
    eventually(lambda: len(server.client.client_list()) > 1)  # the listener asks for the time
    disable()
    no_listeners()


@pytest.mark.usefixtures("faulty")
def test_client_that_fails_to_close_is_an_internal_error(
    hold: Hold, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged as such, and no thread of the application dies with a traceback."""

    def open_failing(place: StorePlace) -> SharedStore:
        opened = open_shared_store(place)
        close = opened.close

        def fail_in_thread() -> None:
            close()
            if threading.current_thread() is not threading.main_thread():
                raise RuntimeError("no")

        monkeypatch.setattr(opened, "close", fail_in_thread)
        return opened

    monkeypatch.setattr(setup, "open_shared_store", open_failing)
    hold({"calls": CALLS}, server.url)
    disable()
    no_listeners()
    eventually(lambda: "quotas failed with RuntimeError" in caplog.text)


# --- processes ------------------------------------------------------------------------------------


def test_a_forked_child_counts_on_a_connection_of_its_own(
    hold: Hold, make_agent: MakeAgent, server: Server, store: SharedStore
) -> None:
    """Although its parent had one, used by a thread."""
    hold({"calls": CALLS}, server.url)
    agent = make_agent(ScriptedModel(endless(says("done"))))
    agent("go")
    children = []
    for _ in range(5):
        child = os.fork()
        if child == 0:
            os._exit(0 if agent("go").stop_reason == "end_turn" else 1)
        children.append(child)
        agent("go")
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 5
    assert store.look([(this_count(), 1000)]) == [CountState(11, 0, 1000)]


FORK_WHILE_LOCKED = """
import gc, os, signal, sys, threading, warnings
import otel_limits, redis
from strands import Agent
from otel_limits.testing import ScriptedModel, endless, says
warnings.simplefilter("ignore", DeprecationWarning)  # this tests forking with threads
otel_limits.enable()
agent = Agent(model=ScriptedModel(endless(says("done"))), callback_handler=None)
agent("go")
pools = [each for each in gc.get_objects() if isinstance(each, redis.ConnectionPool)]
held, forked = threading.Event(), threading.Event()
def hold():
    for pool in pools:
        pool._lock.acquire()
    held.set()
    forked.wait()
    for pool in pools:
        pool._lock.release()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    sys.exit(agent("go").stop_reason != "end_turn")
forked.set()
thread.join()
print(bool(pools), os.waitpid(child, 0)[1])
"""


def test_a_child_that_is_forked_while_a_client_is_locked_counts_and_ends(
    server: Server, store: SharedStore, tmp_path: Path
) -> None:
    """It never waits for locks held by a thread of the parent, not even at exit."""
    policy = tmp_path / "limits.yaml"
    policy.write_text(json.dumps({"quotas": {"calls": CALLS}}))
    variables = {"OTEL_LIMITS_POLICY": str(policy), "OTEL_LIMITS_QUOTA_STORE": server.url}
    done = subprocess.run(
        [sys.executable, "-c", FORK_WHILE_LOCKED],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("True 0\n", "")
    assert store.look([(this_count(), 1000)]) == [CountState(2, 0, 1000)]


PROGRAM = """
import asyncio, otel_limits
from strands import Agent
from otel_limits.testing import ScriptedModel, says
otel_limits.enable()
agent = Agent(model=ScriptedModel([says("a long answer")]), callback_handler=None)
async def leave():
    async for event in agent.stream_async("go"):
        if "data" in event:
            break
asyncio.run(leave())
"""


def test_store_reconnects_any_number_of_times(server: Server, store: SharedStore) -> None:
    """A pool of connections counts a hundred, and then refuses another."""
    for _ in range(150):
        server.client.client_kill_filter(_type="normal", skipme=True)
        (reply,) = store.run([Renew("a", (), 60.0)])
        assert reply.status == "renewed"


def test_exiting_process_sends_pending_settlements(
    server: Server, store: SharedStore, tmp_path: Path
) -> None:
    """The last, interrupted call is settled at exit."""
    policy = tmp_path / "limits.yaml"
    policy.write_text(json.dumps({"quotas": {"calls": CALLS}}))
    variables = {"OTEL_LIMITS_POLICY": str(policy), "OTEL_LIMITS_QUOTA_STORE": server.url}
    subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | variables, check=True, timeout=60
    )
    assert store.look([(this_count(), 1000)]) == [CountState(1, 0, 1000)]


# --- servers --------------------------------------------------------------------------------------


@pytest.fixture
def sentinel(server: Server, tmp_path: Path) -> Iterator[str]:
    """A sentinel that knows the address of the master."""
    port, settings = free_port(), tmp_path / "sentinel.conf"
    settings.write_text(f"sentinel monitor fleet 127.0.0.1 {server.port} 1\n")
    with ExitStack() as stack:
        command = ["redis-server", str(settings), "--sentinel", "--port", str(port)]
        watcher = stack.enter_context(subprocess.Popen(tied(*command), stdout=subprocess.DEVNULL))
        stack.callback(watcher.kill)
        Server(tmp_path, port=port).wait()
        yield f"redis+sentinel://127.0.0.1:{port}/fleet"


@pytest.fixture
def guarded_sentinel(redis_installed: None, tmp_path: Path, certificate: Path) -> Iterator[str]:
    """A sentinel and its master, with separate passwords, over TLS only, in a database."""
    tls = ["--tls-auth-clients", "no", "--tls-cert-file", str(certificate)]
    tls += ["--tls-key-file", str(certificate.with_suffix(".key")), "--tls-replication", "yes"]
    tls += ["--tls-ca-cert-file", str(certificate)]
    port, watching = free_port(), free_port()
    master = Server(tmp_path, *tls, "--tls-port", str(port))
    master.start()
    user = ["worker", "on", ">p@ss/word", "~*", "&*", "+@all"]
    master.client.execute_command("ACL", "SETUSER", *user)
    settings = tmp_path / "sentinel.conf"
    settings.write_text(f"sentinel monitor fleet 127.0.0.1 {port} 1\nrequirepass watch\n")
    command = ["redis-server", str(settings), "--sentinel", "--port", str(free_port())]
    command += [*tls, "--tls-port", str(watching)]
    with ExitStack() as stack:
        watcher = stack.enter_context(subprocess.Popen(tied(*command), stdout=subprocess.DEVNULL))
        stack.callback(watcher.kill)
        eventually(lambda: is_open(watching))
        options = f"tls=true&sentinel_password=watch&ssl_ca_certs={certificate}"
        yield (f"redis+sentinel://worker:p%40ss%2Fword@127.0.0.1:{watching}/fleet/3?{options}")
        disable()
        no_listeners()
        master.stop()


def is_open(port: int) -> bool:
    """Return whether the port accepts connections."""
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def unix_socket(redis_installed: None, tmp_path: Path) -> Iterator[str]:
    """A server on a Unix domain socket."""
    path = tmp_path / "redis.sock"
    server = Server(tmp_path, "--unixsocket", str(path))
    server.start()
    yield f"unix://{path}"
    server.stop()


@pytest.fixture
def valkey(server: Server) -> str:
    """The same server under Valkey's name."""
    return server.url.replace("redis://", "valkey://")


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A self-signed certificate for this machine, next to its key."""
    return deployments.certify(tmp_path)


@pytest.fixture
def tls_server(redis_installed: None, tmp_path: Path, certificate: Path) -> Iterator[str]:
    """A server that also accepts TLS; yields its URL."""
    port, key = free_port(), certificate.with_suffix(".key")
    options = ["--tls-port", str(port), "--tls-auth-clients", "no"]
    options += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    server = Server(tmp_path, *options)
    server.start()
    yield f"rediss://127.0.0.1:{port}/0"
    disable()
    no_listeners()  # Python leaks the socket of a handshake that the server aborts
    server.stop()


@pytest.fixture
def tls(tls_server: str, certificate: Path) -> str:
    """Its URL, with the certificate."""
    return f"{tls_server}?ssl_ca_certs={certificate}"


@pytest.fixture(params=["cluster", "sentinel", "guarded_sentinel", "tls", "unix_socket", "valkey"])
def url(request: pytest.FixtureRequest) -> str:
    """Every kind of store that is not just `redis://`."""
    return str(request.getfixturevalue(request.param))


def test_tls_with_a_plain_port_names_the_scheme(server: Server) -> None:
    """The server waits for the end of a command, so the handshake only times out."""
    store = open_redis(StorePlace(server.url.replace("redis://", "rediss://"), 0.2))
    with pytest.raises(StoreError, match="the URL begins with redis:// instead of rediss://"):
        store.check()


def test_every_kind_of_server_counts(
    hold: Hold, make_agent: MakeAgent, url: str, events: list[Event]
) -> None:
    """Two calls are admitted, plus those of a grant."""
    store = open_redis(StorePlace(url, 20.0))
    hold({"calls": CALLS | {"model_calls": 2}}, url, [events.append])
    model = ScriptedModel(endless(uses("search")))
    assert make_agent(model)("go").stop_reason == "quota_exceeded"
    assert model.calls == 2
    store.change(this_count(), Grant(1, time.time() + 1000))
    make_agent(model)("go")
    assert model.calls == 3
    last = [event for event in events if isinstance(event, QuotaUse)][-1]
    assert (last.used, last.reserved, last.limit) == (3, 0, 3)
    assert [listed.shown for listed in store.keys("calls")] == ["(all)"]
    store.close()


@pytest.mark.usefixtures("faulty")
def test_server_with_an_untrusted_certificate_is_unavailable(
    hold: Hold, make_agent: MakeAgent, tls_server: str
) -> None:
    """`deny` then refuses: usage must not be sent to an impostor."""
    hold({"calls": CALLS}, tls_server)
    assert make_agent(ScriptedModel([says("done")]))("go").stop_reason == "quota_unavailable"


def test_cluster_slot_migration_is_followed(
    cluster: str, hold: Hold, make_agent: MakeAgent
) -> None:
    """A restarted node returns the new location."""
    hold({"calls": CALLS}, cluster)
    agent = make_agent(ScriptedModel(endless(says("done"))))
    agent("go")
    with closing(redis.Redis.from_url(cluster.replace("+cluster", ""))) as operator:
        assert operator.client_kill_filter(_type="normal", skipme=True) > 0
    assert agent("go").stop_reason == "end_turn"


@pytest.fixture
def nodes(redis_installed: None, tmp_path: Path) -> Iterator[Deployment]:
    """A cluster whose nodes can be killed."""
    with deployments.cluster(tmp_path, has_wires=False) as place:
        yield place


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("how", ["stop", "freeze"])
def test_cluster_survives_a_dead_or_hung_node(
    hold: Hold, make_agent: MakeAgent, nodes: Deployment, how: str
) -> None:
    """Also when it is the first one in the URL, or the one with our keys."""
    hold({"calls": {"model_calls": 10_000, "window": "P366D"}}, nodes.url, timeout=2.0)
    agent = make_agent(ScriptedModel(endless(says("done"))))
    _fail_over(agent, nodes, how)


@pytest.fixture
def watched(redis_installed: None, tmp_path: Path) -> Iterator[Deployment]:
    """A master that can be killed, and a Sentinel."""
    with deployments.sentinel(tmp_path, has_wires=False) as place:
        yield place


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("how", ["stop", "freeze"])
def test_a_fleet_follows_the_master_that_its_sentinels_name(
    hold: Hold,
    make_agent: MakeAgent,
    watched: Deployment,
    how: str,
) -> None:
    """No agent is halted, nothing is lost, and kills arrive from the new master."""
    hold({"calls": {"model_calls": 10_000, "window": "P366D"}}, watched.url, timeout=2.0)
    agent = make_agent(ScriptedModel(endless(says("done"))))
    _fail_over(agent, watched, how)
    eventually(lambda: len(watched.servers[-1].client.pubsub_channels("*otel_limits*")) == 2)


def _fail_over(agent: Agent, place: Deployment, how: str) -> None:
    """Kill the server with the keys; the agent continues, and its replica counts all calls."""
    master, replica = place.servers[0], place.servers[-1]
    assert agent("go").stop_reason == "end_turn"
    eventually(lambda: master.client.zcard("{otel_limits}:sharing") == 1)
    getattr(master, how)()
    calls = 1

    def is_followed() -> bool:
        nonlocal calls
        calls += 1
        agent.messages.clear()
        assert agent("go").stop_reason == "end_turn"
        return bool(replica.client.info("commandstats").get("cmdstat_evalsha"))

    def is_all_counted() -> bool:
        try:
            return otel_limits.remaining("calls").used == calls
        except QuotaUnavailableError:  # recovery is checked once a second
            return False

    eventually(is_followed)
    eventually(is_all_counted)


@pytest.mark.parametrize("options", ["", "?socket_timeout=0.1"])
@pytest.mark.parametrize("kind", ["redis", "redis+cluster", "redis+sentinel"])
def test_unreachable_server_raises_one_kind_of_error(kind: str, options: str) -> None:
    """The kill listener retries after it, and a command reports it in one sentence."""
    service = "/quotas" if kind == "redis+sentinel" else ""
    store = open_redis(StorePlace(f"{kind}://127.0.0.1:{free_port()}{service}{options}", 0.1))
    with pytest.raises(StoreError):
        store.now()
    with pytest.raises(StoreError):
        next(store.subscribe(0, threading.Event()))
    store.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis",
        "redis://",
        "http://host",
        "memory",
        "redis+cluster:",
        "redis+sentinel://host/service",
        "redis+sentinel://host:1",
        "sqlite://x",
    ],
)
def test_a_url_of_no_store_is_a_mistake(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message lists the valid kinds, without the password."""
    monkeypatch.setenv("OTEL_LIMITS_QUOTA_STORE", url)
    with pytest.raises(
        ConfigurationError, match="OTEL_LIMITS_QUOTA_STORE must be memory://, redis"
    ):
        enable()


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hush/hush@localhost:6379/0",
        "redis://:12/hush@localhost:6379/0",
        "valkeys+cluster://:12/hush@localhost:6379",
        "rediss://:hush?hush@localhost:6379/0",
        "redis+cluster://:hush#hush@localhost:6379",
        "valkey://localhost:hush",
        "redis://localhost:99999",
        "redis://[hush",
        "redis://localhost?socket_timeout=hush",
        "redis://localhost?hush=1",
        "redis://localhost?cache_config=hush",
        "rediss://localhost?ssl_cert_reqs=hush",
        "redis+sentinel://localhost:1/service?hush=1",
        "redis+sentinel://localhost:1/service?ssl_ca_certs=hush",
        "redis+sentinel://:hush@localhost:99999/service?hush",
    ],
)
def test_a_url_that_the_client_cannot_read_is_a_mistake(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message explains how to write a password, without quoting this one."""
    monkeypatch.setenv("OTEL_LIMITS_QUOTA_STORE", url)
    with pytest.raises(ConfigurationError, match="In a password, write %2F for /") as caught:
        enable()
    assert "hush" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "url",
    [
        "redis://:a%2Fb%40c@localhost:1/0?socket_keepalive=true",
        "valkeys://localhost:1",
        "unix://:secret@/nowhere/redis.sock?db=1",
        "redis+cluster://localhost:1?read_from_replicas=true",
        "redis+cluster://:secret@localhost:1,localhost:2?read_from_replicas=true",
        "redis+sentinel://localhost:1,localhost:2/service",
        "redis+sentinel://me:secret@localhost:1,localhost:2/service/3?tls=true&sentinel_username=a",
        "redis+sentinel://localhost:1/service?tls=true&ssl_ca_certs=ca.pem&socket_timeout=1",
    ],
)
def test_url_that_the_client_can_read_is_accepted(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No server has to be reachable yet."""
    monkeypatch.setenv("OTEL_LIMITS_QUOTA_STORE", url)
    reading = read_settings()
    assert (reading.settings.quota_store, reading.mistakes) == (url, ())


def test_a_store_without_its_client_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the package to install."""
    monkeypatch.delitem(sys.modules, "otel_limits.quotas.redis_server")
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.setenv("OTEL_LIMITS_QUOTA_STORE", "redis://user:secret@host:6379")
    with pytest.raises(ConfigurationError, match=r"Run: pip install .*\[redis\]'") as caught:
        enable()
    assert "secret" not in str(caught.value)


# --- guarantees at any speed ----------------------------------------------------------------------


@pytest.mark.parametrize("held", [1, 4])
def test_call_leaves_at_most_120_bytes_in_the_store(server: Server, held: int) -> None:
    """For an hour, independent of the number of quotas."""
    for_a_call, _ = quotas.kept(server, held, calls=500)
    assert for_a_call <= 120
