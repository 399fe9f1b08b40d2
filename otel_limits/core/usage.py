"""What was used: tokens of model calls, and the tally of an invocation or a budget tree."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Final, Literal, TypeAlias

Number: TypeAlias = int | float | Decimal
"""What is capped: whole turns, tokens and calls, seconds, or exact USD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one or many model calls.

    `input` includes cached tokens and `output` includes reasoning tokens, as the GenAI conventions
    define them; `cache_read` and `cache_write` are parts of `input` and are never added to it.
    So are the other parts: each is `None` where nobody said how much of the whole it is.
    """

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0
    """Tokens put in a cache, for however long."""
    cache_write_1h: int | None = None
    """Those of `cache_write` that are kept for an hour; vendors charge more for them."""
    reasoning: int | None = None
    """Those of `output` that the model thought with."""
    input_audio: int | None = None
    output_audio: int | None = None
    web_searches: int | None = None
    """Requests, not tokens: searches that the vendor made for the model, and charges for."""

    @property
    def total(self) -> int:
        """Input and output together: what a token budget is compared with."""
        return self.input + self.output


NO_USAGE: Final = Usage()

MAX_TOKENS: Final = 2**40
"""More than any model takes or writes in one call: such a figure is a mistake, and is not read."""

Sure: TypeAlias = Literal["measured", "partial", "missing"]
"""How much of a call's usage is known: all of it, a part, or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """What the vendor said of one model call, and what it means.

    Only `otel_limits.usage` makes one: nothing else adds or subtracts tokens of a call.
    """

    usage: Usage = NO_USAGE
    """Tokens as they count; where a part is missing, what is readable."""
    sure: Sure = "missing"
    has_input: bool = False
    """True when the input is known."""
    has_output: bool = False
    total: int | None = None
    """The vendor's own total, which may or may not contain cached tokens."""
    reported: Usage | None = None
    """Tokens as the vendor sent them, 0 where it sent none; `None` when it sent no usage."""
    tier: str | None = None
    """The service tier that the vendor says it used, in its words."""


NOTHING_REPORTED: Final = UsageRecord()


def measured(usage: Usage) -> UsageRecord:
    """Make the record of a call of which all is known."""
    return UsageRecord(
        usage=usage, sure="measured", has_input=True, has_output=True, reported=usage
    )


NO_COST: Final = Decimal(0)

EXACT: Final = Context(prec=60, traps=[])
"""Enough digits for any sum of ours, whatever context the application has set."""


@dataclass(slots=True)
class Tally:
    """What one invocation, or one budget tree, has used so far."""

    iterations: int = 0
    """Turns of the current leg; starts again at every leg and after a context overflow."""
    turns: int = 0
    """Model responses taken into the conversation, over all legs."""
    cycles: int = 0
    """Event loop cycles, replays of interrupted tools included."""
    model_calls: int = 0
    """Requests to a provider, retries and failures included."""
    unmeasured_calls: int = 0
    """Model calls whose provider reported no usage."""
    unmeasured_model: str = ""
    """The model of the last of them."""
    input: int = 0
    """Input tokens of every model call, cached ones and estimates of unmeasured calls included."""
    output: int = 0
    """Output tokens of every model call, reasoning and estimates included."""
    cache_read: int = 0
    cache_write: int = 0
    cost: Decimal = NO_COST
    """USD of every model call with a known price."""
    unpriced_calls: int = 0
    """Model calls with tokens but without a known price."""
    unpriced_model: str = ""
    """The model of the last of them."""
    tool_calls: int = 0
    """Tool calls that ran; retries are the same call, refused and denied ones are not counted."""
    refused_tool_calls: int = 0
    """Tool calls that a limit kept from running."""
    seconds: float = 0.0
    """Monotonic time since the beginning."""
    consecutive_same_tool: int = 0
    """Calls of one tool in a row, in request order, within the leg."""
    identical_tool_calls: int = 0
    """Most calls with equal tool, arguments and result among the last 20."""
    repeated_tool_cycles: int = 0
    """Repetitions of the pattern of 2 to 5 calls that the last calls follow."""
    no_progress_turns: int = 0
    """Turns in a row that added nothing new."""

    @property
    def usage(self) -> Usage:
        """The tokens."""
        # Without the parts that only prices need: those are known per call, and not for a sum.
        return Usage(
            input=self.input,
            output=self.output,
            cache_read=self.cache_read,
            cache_write=self.cache_write,
        )

    @property
    def tokens(self) -> int:
        """Input and output together: what a token budget is compared with."""
        return self.input + self.output
