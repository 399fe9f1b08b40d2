"""Agents whose conversations several processes share, also while the store is unavailable."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import pytest

import otel_limits
from otel_limits.quotas.store import StorePlace
from otel_limits.quotas.stores import open_shared_store
from otel_limits.testing import ScriptedModel, endless, says
from tests.quotas.fixtures import PATIENCE, eventually
from tests.servers.quotas.test_fleet import WORKER, process
from tests.unit.quotas.test_agents import carrying

if TYPE_CHECKING:
    from otel_limits.quotas.redis_store import RedisStore
    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold, Server

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

    def limit(url: str, timeout: float | None = None, **more: Any) -> None:
        hold({}, url, timeout=timeout, defaults=LIMITS | more)

    def begin(url: str, timeout: float | None = None, **more: Any) -> Chat:
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
