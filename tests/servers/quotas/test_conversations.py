"""Processes that share a quota store share the sums of conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import pytest

from otel_limits.quotas.client import StoreClient
from otel_limits.quotas.conversation_sync import SharedConversations, parts_of, sums_of
from otel_limits.quotas.store import KeepsConversations, StoreError, StorePlace
from otel_limits.quotas.store_worker import ThreadedExecutor
from otel_limits.quotas.stores import open_shared_store
from otel_limits.runs.clock import CLOCK
from otel_limits.runs.conversations import ConversationSums
from tests.quotas.fixtures import PATIENCE, eventually

if TYPE_CHECKING:
    from otel_limits.core.usage import Number
    from tests.quotas.fixtures import Server

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
