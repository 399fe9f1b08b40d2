"""Invocations of which every number is known, written through the observer of the ledger."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import TYPE_CHECKING

from otel_limits.core.events import (
    ActionTaken,
    CallKind,
    Invocation,
    ModelCall,
    Started,
    Stop,
    ToolCall,
    ToolStatus,
)
from otel_limits.core.halt_texts import for_operator
from otel_limits.core.limits import Breach, Limits
from otel_limits.core.policy import Verdict
from otel_limits.core.usage import NO_COST, Usage
from otel_limits.observers.ledger import LedgerObserver

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from otel_limits.ledger.address import Address

NINE = 1_760_000_400.0
"""2025-10-09 09:00:00 UTC, when the first invocation begins unless a test says otherwise."""
DAY = 24 * 60 * 60.0


@dataclass(frozen=True, kw_only=True)
class Call:
    """One model call."""

    input: int = 100
    output: int = 20
    cached: int = 0
    written: int = 0
    price: str | None = None
    saved: str | None = None
    """USD that a cache saved."""
    stated: str | None = None
    """USD that its response states."""
    listed: str | None = None
    """USD by the price list."""
    model: str = "m"
    provider: str = "unknown"
    kind: CallKind = "measured"
    estimated: bool = False
    turn: int | None = None
    tools: Sequence[str] = ()
    """Its tool calls; `search!` fails, and the part after `=` is the fingerprint. `search?` is
    refused at its cap, and `search??` only observed to be there."""
    side: bool = False
    charges: str | None = None
    """Its charges in a shared store, as they are encoded."""

    @property
    def usage(self) -> Usage:
        """Its tokens."""
        return Usage(
            input=self.input,
            output=self.output,
            cache_read=self.cached,
            cache_write=self.written,
        )

    @property
    def cost(self) -> Decimal | None:
        """Its price."""
        return None if self.price is None else Decimal(self.price)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One invocation."""

    agent: str = "worker"
    calls: Sequence[Call] = field(default_factory=lambda: [Call()])
    reason: str = "end_turn"
    action: ActionTaken = "none"
    breach: Breach | None = None
    limits: Limits = field(default_factory=Limits)
    at: float = NINE
    session: str | None = None
    conversation: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)
    parent: Invocation | None = None
    tools: Sequence[str] = ()


class Book:
    """Writes entries into a ledger."""

    def __init__(self, address: Address, first: int = 1) -> None:
        """Begin with nothing written; ids are made from numbers, beginning with `first`."""
        self._observer = LedgerObserver(address, "background")
        self._number = first - 1

    def write(self, entry: Entry) -> Invocation:
        """Record an invocation from its beginning to its end."""
        self._number += 1
        identity = f"{self._number:032x}"
        parent = entry.parent
        invocation = Invocation(
            agent=entry.agent,
            id=identity,
            root_id=parent.root_id if parent else identity,
            parent_id=parent.id if parent else None,
            trace_id=parent.trace_id if parent else f"{self._number:08x}" + 24 * "a",
            span_id=f"{self._number:016x}",
            conversation=entry.conversation,
        )
        self._begin(invocation, entry)
        done: list[tuple[int, str]] = []
        after: Mapping[str, int] = {}
        for number, call in enumerate(entry.calls, start=1):
            event = self._call(invocation, entry, number, call)
            done += [(event.turn, tool) for tool in call.tools]
            if call.side:
                self._observer(event)
                continue
            self._observer(replace(event, after_tools=after))
            after = Counter(name_of(tool) for tool in call.tools)
        done += [(1, tool) for tool in entry.tools]
        for number, (turn, tool) in enumerate(done, start=1):
            self._observer(tool_call(invocation, number, turn, tool, entry.at))
        self._observer(stop_of(invocation, entry))
        return invocation

    def _begin(self, invocation: Invocation, entry: Entry) -> None:
        self._observer(
            Started(
                invocation=invocation,
                limits=entry.limits,
                action="halted",
                unsampled=False,
                session_id=entry.session,
                attributes=entry.attributes,
                at=entry.at,
            )
        )

    def _call(self, invocation: Invocation, entry: Entry, number: int, call: Call) -> ModelCall:
        turn = call.turn or number
        return ModelCall(
            invocation=invocation,
            number=number,
            model=call.model,
            provider=call.provider,
            kind=call.kind,
            usage=call.usage,
            estimated=call.estimated,
            span_id=f"{self._number:08x}{number:08x}",
            seconds=1.0,
            price=call.cost,
            price_source=None if call.price is None else "policy",
            cache_saved=None if call.saved is None else Decimal(call.saved),
            stated_cost=None if call.stated is None else Decimal(call.stated),
            listed_price=None if call.listed is None else Decimal(call.listed),
            side=call.side,
            quota_charges=call.charges,
            turn=turn,
            iteration=turn,
            at=entry.at + number,
        )

    def close(self) -> None:
        """Flush everything."""
        self._observer.close()


def name_of(tool: str) -> str:
    """The tool of `search!=1`."""
    return tool.partition("=")[0].rstrip("!?")


def tool_call(invocation: Invocation, number: int, turn: int, tool: str, at: float) -> ToolCall:
    """Half a second of a tool, unless it is refused."""
    called, _, told_by = tool.partition("=")
    status = _status(called)
    return ToolCall(
        invocation=invocation,
        number=number,
        tool=name_of(tool),
        status=status,
        seconds=None if status == "refused" else 0.5,
        fingerprint=f"{told_by:0<32}" if told_by else None,
        turn=turn,
        limit="max_calls_per_tool" if called.endswith("?") else None,
        at=at,
    )


def _status(called: str) -> ToolStatus:
    if called.endswith("?") and not called.endswith("??"):
        return "refused"
    return "error" if called.endswith("!") else "success"


def stop_of(invocation: Invocation, entry: Entry) -> Stop:
    """How an entry ends: the sums of its calls."""
    verdict = Verdict(entry.reason, (entry.breach,) if entry.breach else ())
    return Stop(
        reason=entry.reason,
        action=entry.action,
        breach=entry.breach,
        sentence=for_operator(invocation.agent, verdict, entry.action),
        turns=max((call.turn or n for n, call in enumerate(entry.calls, start=1)), default=0),
        usage=Usage(
            input=sum(call.input for call in entry.calls),
            output=sum(call.output for call in entry.calls),
            cache_read=sum(call.cached for call in entry.calls),
            cache_write=sum(call.written for call in entry.calls),
        ),
        agent=invocation.agent,
        trace_id=invocation.trace_id,
        invocation_id=invocation.id,
        model_calls=len(entry.calls),
        started=entry.at,
        seconds=float(len(entry.calls)),
        tool_calls=len(entry.tools) + sum(len(call.tools) for call in entry.calls),
        cost=sum((call.cost or NO_COST for call in entry.calls), NO_COST),
        unpriced_calls=sum(call.price is None and call.usage.total > 0 for call in entry.calls),
        synthetic=entry.action in ("halted", "killed"),
        invocation=invocation,
    )


def write(address: Address, *entries: Entry, first: int = 1) -> list[Invocation]:
    """Write entries and close the book."""
    book = Book(address, first)
    try:
        return [book.write(entry) for entry in entries]
    finally:
        book.close()
