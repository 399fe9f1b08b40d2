"""Each process sends the usage of a conversation that no other one sends."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import TYPE_CHECKING

from otel_limits import Limits
from otel_limits.core.policy import Policy
from otel_limits.core.price import Quote
from otel_limits.quotas.client import StoreClient
from otel_limits.quotas.conversation_sync import ConversationSync, SharedConversations
from otel_limits.quotas.engine import Engine
from otel_limits.quotas.memory import MemoryStore
from otel_limits.quotas.store import ReadConversation
from otel_limits.quotas.store_worker import InlineExecutor
from otel_limits.quotas.wait_queues import WaitQueues
from otel_limits.runs.calls import InFlightCall
from otel_limits.runs.clock import CLOCK
from otel_limits.runs.conversations import Conversation
from otel_limits.runs.quota_gate import AdmissionRequest
from otel_limits.runs.registry import RunRegistry

if TYPE_CHECKING:
    from otel_limits.runs.run import Run

POLICY = Policy(conversation=Limits(max_turns=9, max_tool_calls=9))


class Worker:
    """A process whose invocations belong to one conversation, which a store keeps."""

    def __init__(self) -> None:
        """Connect to the store."""
        self.runs, self.store, queues = RunRegistry(), MemoryStore(), WaitQueues(CLOCK)
        client = StoreClient(InlineExecutor(self.store, queues.notify_freed), 2.0, CLOCK)
        self.runs.observers.gate = Engine(
            tuple,
            client,
            publish=self.runs.observers.publish,
            price=lambda *_: Quote(price=Decimal(1)),
            queues=queues,
            is_active=self.runs.__contains__,
            conversations=ConversationSync(SharedConversations(client, CLOCK), self.runs),
        )

    def begin(self) -> Run:
        """Begin an invocation."""
        return self.runs.start("writer", POLICY, conversation="chat")

    def call_model(self, run: Run) -> None:
        """Call a model, which requests a tool."""
        conversations = tuple(each for each in run.trees if isinstance(each, Conversation))
        request = AdmissionRequest(
            invocation=run.invocation, model="m", input=1, conversations=conversations
        )
        assert self.runs.observers.gate is not None
        assert asyncio.run(self.runs.observers.gate.admit_by_quotas(request)) is None
        call = InFlightCall("m")
        run.calls.admit_by_limits(call, turn=True)
        run.calls.open(call)
        run.calls.settle(call)
        run.count_turn(call)
        run.tools.admit_tool("search")

    @property
    def sums(self) -> tuple[int, ...]:
        """The model calls, turns and tool calls that the store has."""
        (conversation,) = self.runs.conversations
        (reply,) = self.store.run([ReadConversation(conversation.key)])
        assert reply.conversation is not None
        sums = reply.conversation.sums
        return tuple(sums.get(name, 0) for name in ("model_calls", "turns", "tool_calls"))


def test_forked_child_sends_no_turn_of_its_parent() -> None:
    """While a tool runs, the parent has not sent its turn yet; it does so afterwards."""
    worker = Worker()
    parent = worker.begin()
    worker.call_model(parent)
    assert worker.sums == (1, 0, 0)
    worker.runs.after_fork()
    child = worker.begin()
    worker.call_model(child)
    child.finish("end_turn")
    assert worker.sums == (2, 1, 1)
