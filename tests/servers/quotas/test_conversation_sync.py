"""Processes that share a quota store share the sums of conversations."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import pytest

import otel_limits
from otel_limits.quotas.client import StoreClient
from otel_limits.quotas.conversation_sync import SharedConversations, parts_of, sums_of
from otel_limits.quotas.store import KeepsConversations, StoreError, StorePlace
from otel_limits.quotas.store_worker import ThreadedExecutor
from otel_limits.quotas.stores import open_shared_store
from otel_limits.runs.clock import CLOCK
from otel_limits.runs.conversations import ConversationSums
from otel_limits.testing import ScriptedModel, endless, says
from tests.quotas.fixtures import PATIENCE, eventually
from tests.servers.quotas.test_fleet import WORKER, process
from tests.unit.agents.test_quotas import carrying

if TYPE_CHECKING:
    from otel_limits.core.usage import Number
    from otel_limits.quotas.redis_store import RedisStore
    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold, Server


KEY, AGENT, IDLE = "c" * 32, "writer", 600.0


class Process:
    """A process with a connection to the store, and the sums that it knows."""

    def __init__(self, url: str, timeout: float) -> None:
        """Connect in the background."""
        worker = ThreadedExecutor(open_shared_store(StorePlace(url, timeout)))
        self.client = StoreClient(worker, timeout, CLOCK)
        self.client.start()
        self.shared = SharedConversations(self.client, CLOCK)

    def add(self, turns: int, **more: Any) -> None:
        """Add to the conversation."""
        self.shared.add(KEY, AGENT, parts_of(ConversationSums(turns=turns, **more)), IDLE)

    def read(self) -> ConversationSums | None:
        """Read the conversation, as before the first call of an invocation."""
        asyncio.run(self.shared.refresh(KEY))
        return self.known

    @property
    def known(self) -> ConversationSums | None:
        """The sums that decide about the next call."""
        known = self.shared.known(KEY)
        return sums_of(known) if known else None

    def can_read(self) -> bool:
        """Whether the store answers."""
        try:
            self.read()
        except StoreError:
            return False
        return True


def turns(number: int) -> ConversationSums:
    """A conversation with this number of turns."""
    return ConversationSums(turns=number)


Start: TypeAlias = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start processes with a store."""
    processes: list[Process] = []

    def begin(server: Server, timeout: float = PATIENCE) -> Process:
        processes.append(Process(server.url, timeout))
        return processes[-1]

    yield begin
    for each in processes:
        each.client.close()


def test_a_process_counts_on_from_the_sums_of_another(start: Start, server: Server) -> None:
    """It reads them before its first call, also if it has just been restarted."""
    first, second = start(server), start(server)
    assert first.read() is None
    first.add(1, tokens=10)
    first.add(1, tokens=5)
    first.read()
    assert second.read() == ConversationSums(turns=2, tokens=15)
    first.client.close()
    assert start(server).read() == ConversationSums(turns=2, tokens=15)


def test_all_sums_reach_other_processes_exactly(start: Start, server: Server) -> None:
    """USD without rounding, what was asked for once, and what persons have granted."""
    first, second = start(server), start(server)
    price = Decimal("0.000000000001")
    granted: dict[str, Number] = {"max_turns": 5, "max_cost_usd": Decimal("0.1")}
    part = ConversationSums(
        turns=1,
        model_calls=2,
        tool_calls=3,
        tokens=4,
        cost=price,
        cost_at_most=price * 3,
        has_asked=True,
        granted=granted,
    )
    for _ in range(2):
        first.shared.add(KEY, AGENT, parts_of(part), IDLE)
    # A tool call was taken back.
    first.shared.add(KEY, AGENT, {"tool_calls": -1}, IDLE)
    expected = ConversationSums(
        turns=2,
        model_calls=4,
        tool_calls=5,
        tokens=8,
        cost=price * 2,
        cost_at_most=price * 6,
        has_asked=True,
        granted={"max_turns": 10, "max_cost_usd": Decimal("0.2")},
    )
    assert first.read() == first.known == second.read() == expected


def test_a_process_counts_its_own_additions_before_the_reply(start: Start, server: Server) -> None:
    """In one process the sums are exact."""
    process = start(server)
    process.read()
    for number in range(1, 21):
        process.add(1)
        assert process.known == turns(number)
    assert process.read() == turns(20)


def test_the_reply_to_an_addition_has_the_calls_of_others(start: Start, server: Server) -> None:
    """A long invocation notices those of another process without reading again."""
    first, second = start(server), start(server)
    first.read()
    second.read()
    for _ in range(3):
        second.add(1)
    second.read()
    first.add(1)
    eventually(lambda: first.known == turns(4), lambda: first.known)


def test_an_operators_reset_reaches_every_process(start: Start, server: Server) -> None:
    """Its next invocation begins with nothing used."""
    process = start(server)
    process.add(7)
    assert process.read() == turns(7)
    store = cast("KeepsConversations", open_shared_store(StorePlace(server.url, PATIENCE)))
    assert store.forget_conversation(KEY)
    store.close()
    assert process.read() is None


@pytest.mark.usefixtures("faulty")
def test_additions_during_an_outage_count_once_here_and_for_others(
    start: Start, own_server: Server
) -> None:
    """The server hangs, so it may have applied some of them already: each counts once."""
    process = start(own_server, 0.5)
    eventually(process.can_read)
    process.add(1)
    assert process.read() == turns(1)
    own_server.freeze()
    process.add(10)
    with pytest.raises(StoreError):
        process.read()
    process.add(100)
    assert process.known == turns(111)
    own_server.thaw()
    eventually(process.can_read)
    assert process.known == turns(111)
    assert start(own_server).read() == turns(111)


@pytest.mark.usefixtures("faulty")
def test_server_that_lost_its_data_has_only_the_additions_after_it(
    start: Start, own_server: Server
) -> None:
    """Conversations are not rebuilt: this process continues from what the store has."""
    process = start(own_server, 0.5)
    eventually(process.can_read)
    process.add(1)
    process.read()
    own_server.stop()
    process.add(10)
    assert process.known == turns(11)
    own_server.start()
    eventually(process.can_read)
    assert process.known == turns(10)


# --- agents that share conversations --------------------------------------------------------------

LIMITS: Any = {"conversation": {"max_turns": 3}, "conversation_key": "baggage.chat.id"}


class Chat:
    """An agent, and what it has answered in one conversation."""

    def __init__(self, agent: Any, limit: Callable[..., None]) -> None:
        """Begin a conversation, whose ID is new: those of this process are kept."""
        self.agent, self.limit = agent, limit
        self.id = uuid.uuid4().hex

    def send(self, number: int, another: str = "") -> list[str]:
        """Send messages, maybe in another conversation; return how the invocations have ended."""
        with carrying(chat__id=another or self.id):
            return [self.agent("go").stop_reason for _ in range(number)]

    def send_elsewhere(self, number: int) -> dict[str, int]:
        """Send messages from another process; return how many invocations have ended how."""
        command = [
            sys.executable,
            str(WORKER),
            "chat",
            json.dumps({"name": self.id, "number": number}),
        ]
        with process(command, {}) as worker:
            output, _ = worker.communicate("go\n")
        return cast("dict[str, int]", json.loads(output.splitlines()[-1]))

    @property
    def calls(self) -> int:
        """How often the model was called."""
        return int(self.agent.model.calls)


Open: TypeAlias = Callable[..., Chat]


@pytest.fixture
def open_chat(hold: Hold, make_agent: MakeAgent) -> Open:
    """Limit the conversations of this process, and make an agent."""

    def limit(url: str, timeout: float = PATIENCE, **more: Any) -> None:
        hold({}, url, timeout=timeout, defaults=LIMITS | more)

    def begin(url: str, timeout: float = PATIENCE, **more: Any) -> Chat:
        limit(url, timeout, **more)
        return Chat(make_agent(ScriptedModel(endless(says("x"))), name="worker"), limit)

    return begin


def test_conversation_is_limited_across_processes(open_chat: Open, server: Server) -> None:
    """A cap of three permits exactly three turns, in one process after the other."""
    chat = open_chat(server.url)
    assert chat.send(1) == ["end_turn"]
    assert chat.send_elsewhere(1) == {"end_turn": 1}
    assert chat.send(2) == ["end_turn", "max_turns"]
    assert chat.calls == 2
    assert chat.send_elsewhere(2) == {"max_turns": 2}
    assert chat.send(1, "another") == ["end_turn"]


def test_conversation_counts_on_after_an_operators_reset(open_chat: Open, server: Server) -> None:
    """Also one that was refused."""
    chat = open_chat(server.url)
    assert chat.send(4) == ["end_turn"] * 3 + ["max_turns"]
    store = cast("RedisStore", open_shared_store(StorePlace(server.url, PATIENCE)))
    (record,) = store.conversations()
    assert (record.agent, record.sums["turns"]) == ("worker", 3)
    store.forget_conversation(record.conversation)
    store.close()
    assert chat.send(4) == ["end_turn"] * 3 + ["max_turns"]


@pytest.mark.usefixtures("faulty")
def test_invocation_that_begins_in_an_outage_is_refused(
    open_chat: Open, own_server: Server
) -> None:
    """By default, with the reason of the store and without a model call."""
    chat = open_chat(own_server.url, 0.5)
    eventually(lambda: chat.send(1, "warm up") == ["end_turn"])
    calls = chat.calls
    own_server.freeze()
    with carrying(chat__id=chat.id):
        result = chat.agent("go")
    stop = otel_limits.stop_of(result)
    assert stop is not None
    assert (result.stop_reason, chat.calls) == ("quota_unavailable", calls)
    reason = "the limits of its conversation could not be checked because the quota store is"
    assert reason in stop.sentence
    assert "conversation_on_store_error sets the behavior during an outage" in stop.sentence
    own_server.thaw()
    eventually(lambda: chat.send(1) == ["end_turn"])


@pytest.mark.usefixtures("faulty")
def test_sums_are_kept_if_their_store_was_never_reached(
    open_chat: Open, own_server: Server
) -> None:
    """A new connection to a store knows nothing, and the conversation still ends at its cap."""
    chat = open_chat(own_server.url)
    assert chat.send(2) == ["end_turn"] * 2
    own_server.freeze()
    otel_limits.disable()
    chat.limit(own_server.url, 0.5, conversation_on_store_error="allow")
    assert chat.send(2) == ["end_turn", "max_turns"]


@pytest.mark.usefixtures("faulty")
def test_allowed_invocations_count_on_in_an_outage(open_chat: Open, own_server: Server) -> None:
    """In this process; the others learn of it afterwards."""
    chat = open_chat(own_server.url, 0.5, conversation_on_store_error="allow")
    assert chat.send(1) == ["end_turn"]
    own_server.freeze()
    assert chat.send(3) == ["end_turn", "end_turn", "max_turns"]
    own_server.thaw()
    store = cast("RedisStore", open_shared_store(StorePlace(own_server.url, PATIENCE)))
    eventually(lambda: [each.sums.get("turns") for each in store.conversations()] == [3])
    store.close()
    assert chat.send_elsewhere(1) == {"max_turns": 1}
