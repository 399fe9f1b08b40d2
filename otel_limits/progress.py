"""Sums up what an invocation uses, so that whoever asks now and then is told each bit once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from otel_limits.limits import EXACT, NO_COST
from otel_limits.records import Record, record

if TYPE_CHECKING:
    from collections.abc import Mapping
    from decimal import Decimal

    from otel_limits.facts import CallKind, Invocation, ToolStatus
    from otel_limits.limits import Usage


@dataclass(slots=True)
class Spent:
    """What model calls of one model that ended alike have taken together."""

    calls: int = 0
    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0
    cost: Decimal = NO_COST
    """USD of the calls with a known price."""
    unpriced: int = 0
    """Tokens of the others."""
    span_id: str | None = None
    """The `chat` span of the last one, where it has one."""

    def add(self, usage: Usage, price: Decimal | None, span_id: str | None) -> Spent:
        """Add one more call."""
        self.calls += 1
        self.input += usage.input
        self.output += usage.output
        if usage.cache_read or usage.cache_write:
            self.cache_read += usage.cache_read
            self.cache_write += usage.cache_write
        if price is not None and price.is_finite() and price >= 0:
            self.cost = EXACT.add(self.cost, price)
        else:  # no counter can be increased by a price that is none
            self.unpriced += usage.input + usage.output
        self.span_id = span_id
        return self

    def minus(self, told: Spent) -> Spent:
        """Return what it has more than an earlier state of it."""
        return Spent(
            self.calls - told.calls,
            self.input - told.input,
            self.output - told.output,
            self.cache_read - told.cache_read,
            self.cache_write - told.cache_write,
            EXACT.subtract(self.cost, told.cost),
            self.unpriced - told.unpriced,
            self.span_id,
        )


NOTHING_SPENT: Final = Spent()


@record
class Used(Record):
    """What an invocation has used since this was last told.

    It says in sums what the facts of every turn say one by one, to those who want it so.
    """

    invocation: Invocation
    turns: int
    cycles: int
    calls: Mapping[tuple[str, CallKind], Spent]
    """By model and kind."""
    tools: Mapping[tuple[str, ToolStatus], int]
    """How many calls, by tool and status."""

    def __bool__(self) -> bool:
        """Tell whether it is anything."""
        return bool(self.turns or self.cycles or self.calls or self.tools)

    def since(self, told: Used) -> Used:
        """Return what it has more than an earlier state of it."""
        return Used(
            invocation=self.invocation,
            turns=self.turns - told.turns,
            cycles=self.cycles - told.cycles,
            calls={
                key: spent.minus(before)
                for key, spent in self.calls.items()
                if spent != (before := told.calls.get(key, NOTHING_SPENT))
            },
            tools={
                key: number - told.tools.get(key, 0)
                for key, number in self.tools.items()
                if number != told.tools.get(key)
            },
        )


class Progress:
    """How far an invocation has come, by what metrics tell apart, and how much of it was told."""

    __slots__ = ("_told", "calls", "tools")

    def __init__(self) -> None:
        """Begin with nothing."""
        self.calls: dict[tuple[str, CallKind], Spent] = {}
        self.tools: dict[tuple[str, ToolStatus], int] = {}
        self._told: list[Used | None] = [None]
        """One state, or none while it is looked at."""

    def called(
        self, model: str, kind: CallKind, usage: Usage, price: Decimal | None, span_id: str | None
    ) -> None:
        """Count a model call."""
        spent = self.calls.get((model, kind))
        if spent is None:
            spent = self.calls[model, kind] = Spent()
        spent.add(usage, price, span_id)

    def take(self, invocation: Invocation, turns: int, cycles: int) -> Used | None:
        """Return what has not been told, if anything, which is told from then on.

        A signal handler may ask on the thread that is just doing so: it gets nothing.
        """
        try:
            told = self._told.pop()
        except IndexError:
            return None
        try:
            now = self._state(invocation, turns, cycles)
            fresh = now if told is None else now.since(told)
            told = now
        finally:
            self._told.append(told)
        return fresh or None

    def skip(self, invocation: Invocation, turns: int, cycles: int) -> None:
        """Take all of it for told, whoever was just looking at it."""
        self._told = [self._state(invocation, turns, cycles)]

    def _state(self, invocation: Invocation, turns: int, cycles: int) -> Used:
        return Used(
            invocation=invocation,
            turns=turns,
            cycles=cycles,
            calls={key: spent.minus(NOTHING_SPENT) for key, spent in self.calls.copy().items()},
            tools=self.tools.copy(),
        )
