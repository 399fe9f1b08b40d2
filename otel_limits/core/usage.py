"""Usage: tokens of model calls, the tally of an invocation or a tree, the state of a quota."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Context, Decimal
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

Number: TypeAlias = int | float | Decimal
"""Values with a cap: whole turns, tokens and calls, seconds, or exact USD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one or more model calls.

    `input` includes cached tokens and `output` includes reasoning tokens, as the GenAI conventions
    define them; `cache_read` and `cache_write` are parts of `input` and are never added to it. So
    are the other parts: each is `None` if it was not reported.
    """

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0
    """Tokens written to a cache, for any lifetime."""
    cache_write_1h: int | None = None
    """Those of `cache_write` with a lifetime of one hour, for which vendors charge more."""
    reasoning: int | None = None
    """Reasoning tokens of `output`."""
    input_audio: int | None = None
    output_audio: int | None = None
    web_searches: int | None = None
    """Number of web searches by the vendor, which it bills separately."""

    @property
    def total(self) -> int:
        """Input plus output: the value that a token budget limits."""
        return self.input + self.output


NO_USAGE: Final = Usage()

MAX_TOKENS: Final = 2**40
"""More than any model can use in one call: a larger number is an error and is ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unplaced:
    """Tokens of a usage whose rate is unknown, so that its price is unknown, too."""

    names: tuple[str, ...] = ()
    """The vendor's names of those that it reported."""
    reason: str
    """Why their rate is unknown."""
    input: int = 0
    """Tokens of the input that may have any of its rates."""
    output: int = 0
    either: int = 0
    """Those of the input that may be output."""
    more_input: int = 0
    """Tokens that the input may leave out."""
    more_output: int = 0

    def __add__(self, more: Unplaced) -> Unplaced:
        """Return both, as of a call that is reported in parts."""
        reasons = dict.fromkeys([self.reason, more.reason])
        return Unplaced(
            names=tuple(dict.fromkeys(self.names + more.names)),
            reason="; ".join(reasons),
            input=self.input + more.input,
            output=self.output + more.output,
            either=self.either + more.either,
            more_input=self.more_input + more.more_input,
            more_output=self.more_output + more.more_output,
        )


Sure: TypeAlias = Literal["measured", "partial", "missing"]
"""How much of a call's usage is known: all, a part, or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """The usage of one model call, as reported and as counted.

    Only `otel_limits.usage` creates one: nothing else adds or subtracts tokens of a call.
    """

    usage: Usage = NO_USAGE
    """Tokens as counted; the readable part if something is missing."""
    sure: Sure = "missing"
    has_input: bool = False
    """True if the input is known."""
    has_output: bool = False
    total: int | None = None
    """The vendor's own total, with or without cached tokens."""
    reported: Usage | None = None
    """Tokens as the vendor sent them, 0 if missing; `None` if it sent no usage."""
    tier: str | None = None
    """The service tier as named by the vendor."""
    unplaced: Unplaced | None = None
    """Tokens whose rate is unknown, if there are any."""
    billing: Mapping[str, object] = field(default_factory=dict)
    """Other fields of the vendor's usage that decide the price, as sent, such as stated costs."""

    @property
    def is_zero(self) -> bool:
        """True if the vendor reported usage, and no token in it."""
        return self.sure != "missing" and not (self.usage.total or self.total)


NOTHING_REPORTED: Final = UsageRecord()


def measured(usage: Usage) -> UsageRecord:
    """Return the record of a call whose usage is fully known."""
    return UsageRecord(
        usage=usage, sure="measured", has_input=True, has_output=True, reported=usage
    )


NO_COST: Final = Decimal(0)

EXACT: Final = Context(prec=60, traps=[])
"""Enough digits for any sum, whatever context the application has set."""


NO_FAILURES: Final[Mapping[str, int]] = MappingProxyType({})


SUMS: Final = (
    "turns",
    "cycles",
    "model_calls",
    "unmeasured_calls",
    "input",
    "output",
    "cache_read",
    "cache_write",
    "unpriced_calls",
    "unbounded_calls",
    "tool_calls",
    "refused_tool_calls",
    "seconds",
)
"""Fields of a tally that only grow, without those in USD."""


@dataclass(slots=True)
class Tally:
    """The current usage of one invocation or one budget tree."""

    iterations: int = 0
    """Turns of the current leg; reset by every leg and by a context overflow."""
    turns: int = 0
    """Model responses accepted into the conversation, over all legs."""
    cycles: int = 0
    """Event loop cycles, including replays of interrupted tools."""
    model_calls: int = 0
    """Requests to a provider, including retries and failures."""
    unmeasured_calls: int = 0
    """Model calls whose provider reported no usage."""
    unmeasured_model: str = ""
    """The model of the last of them."""
    input: int = 0
    """Input tokens of every model call, including cached ones and estimates."""
    output: int = 0
    """Output tokens of every model call, including reasoning and estimates."""
    cache_read: int = 0
    cache_write: int = 0
    cost: Decimal = NO_COST
    """USD of every model call with a known price."""
    cost_at_most: Decimal = NO_COST
    """`cost`, plus the upper bounds of unknown prices: the value that a limit in USD counts."""
    unpriced_calls: int = 0
    """Model calls with tokens but without a known price."""
    unbounded_calls: int = 0
    """Those of them whose price has no known upper bound either."""
    unbounded_model: str = ""
    """The model of the last of them."""
    unbounded_because: str = ""
    """Why its price is unknown, as part of a sentence."""
    tool_calls: int = 0
    """Tool calls that ran, without retries and refused or denied calls."""
    refused_tool_calls: int = 0
    """Tool calls refused by a limit."""
    seconds: float = 0.0
    """Elapsed monotonic time."""
    consecutive_same_tool: int = 0
    """Consecutive calls of one tool, in request order, within the leg."""
    identical_tool_calls: int = 0
    """Most calls with equal tool, arguments and result among the last 20."""
    repeated_tool_cycles: int = 0
    """Repetitions of a pattern of 2 to 5 calls that the last calls follow."""
    no_progress_turns: int = 0
    """Consecutive turns that added nothing new."""
    consecutive_tool_failures: int = 0
    """Consecutive turns in which every tool call failed."""
    consecutive_failures_per_tool: Mapping[str, int] = field(default_factory=lambda: NO_FAILURES)
    """The same for each tool that failed last."""
    consecutive_handoffs: int = 0
    """Consecutive hand-offs in the invocation's whole tree, without another tool in between."""
    repeated_failures: int = 0
    """Consecutive failures before the invocation that began with its input."""

    def since(self, before: Tally) -> Tally:
        """Return what was added to an earlier tally; loops and iterations are those of now."""
        sums = {name: getattr(self, name) - getattr(before, name) for name in SUMS}
        return replace(
            self,
            **sums,
            cost=EXACT.subtract(self.cost, before.cost),
            cost_at_most=EXACT.subtract(self.cost_at_most, before.cost_at_most),
        )

    @property
    def usage(self) -> Usage:
        """The tokens."""
        # Without the parts that only prices need, which are known per call only.
        return Usage(
            input=self.input,
            output=self.output,
            cache_read=self.cache_read,
            cache_write=self.cache_write,
        )

    @property
    def has_bounds(self) -> bool:
        """True if `cost_at_most` contains upper bounds of unknown prices."""
        return self.cost_at_most != self.cost

    @property
    def tokens(self) -> int:
        """Input plus output: the value that a token budget limits."""
        return self.input + self.output


# --- state of a quota -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRefusal:
    """The state of a quota that refused a model call."""

    quota: str
    key: str
    """The partition of the quota; values from outside appear as a hash."""
    unit: str
    """Unit of `used`, `reserved` and `limit`, such as `tokens` or `USD`."""
    used: Number
    reserved: Number
    """Reserved by in-flight calls."""
    limit: Number
    """The limit, including grants."""
    resets_at: float
    """End of the window, in seconds since the epoch; without a window, when to retry."""
    retry_after_seconds: float | None
    """Seconds until a retry may succeed; `None` while the key is blocked without an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """Remaining usage of one quota key in the current window. Reading it reserves nothing."""

    quota: str
    key: str
    """The partition of the quota; values from outside appear as a hash."""
    unit: str
    """Unit of the numbers: `tokens`, `USD` (as `Decimal`), `model calls`, `invocations` or
    `concurrent model calls`."""
    limit: Number
    """The limit, including grants."""
    used: Number
    reserved: Number
    """Reserved by in-flight calls."""
    left: Number
    """Usage that can still be reserved."""
    resets_at: float
    """End of the window, or when a token bucket is full, in seconds since the epoch.

    Now if there is no window.
    """
