"""What may be spent, what was spent, and the pure decision between the two."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

MAX_ITERATIONS_STOP_REASON: Final = "max_iterations"
MAX_TURNS_STOP_REASON: Final = "max_turns"
MAX_TOKEN_BUDGET_STOP_REASON: Final = "max_token_budget"  # noqa: S105  a reason, no password

Action = Literal["observe", "halt", "raise"]
ACTIONS: Final[tuple[Action, ...]] = ("observe", "halt", "raise")

Unmeasured = Literal["estimate", "ignore", "halt"]
UNMEASURED: Final[tuple[Unmeasured, ...]] = ("estimate", "ignore", "halt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one or many model calls.

    `input` includes cached tokens and `output` includes reasoning tokens, as the GenAI conventions
    define them; `cache_read` and `cache_write` are parts of `input` and are never added to it.
    """

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0

    @property
    def total(self) -> int:
        """Input and output together: what a token budget is compared with."""
        return self.input + self.output

    def __add__(self, other: Usage) -> Usage:
        """Both usages together."""
        return Usage(
            input=self.input + other.input,
            output=self.output + other.output,
            cache_read=self.cache_read + other.cache_read,
            cache_write=self.cache_write + other.cache_write,
        )


NO_USAGE: Final = Usage()


@dataclass(slots=True)
class Tally:
    """What one invocation has used so far."""

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
    usage: Usage = NO_USAGE
    """Tokens of every model call, estimates of unmeasured calls included."""


@dataclass(frozen=True, slots=True)
class Level:
    """How much of one limit has been used."""

    limit: str
    cap: int
    observed: int


@dataclass(frozen=True, slots=True)
class Breach:
    """The fact that a limit was reached."""

    limit: str
    """Name of the limit, such as `max_turns`."""
    cap: int
    """What the limit permits."""
    observed: int
    """What was counted when the limit was found to be reached; never below `cap`."""
    reason: str
    """The stop reason that this breach leads to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitKind:
    """One kind of limit: what it caps and how it is told."""

    name: str
    reason: str
    unit: str
    observed: Callable[[Tally], int]
    yields_to_output: bool = False
    """True when the call that only forces structured output is still permitted."""


KINDS: Final[tuple[LimitKind, ...]] = (
    LimitKind(
        name="max_iterations",
        reason=MAX_ITERATIONS_STOP_REASON,
        unit="turns",
        observed=lambda tally: tally.iterations,
        yields_to_output=True,
    ),
    LimitKind(
        name="max_turns",
        reason=MAX_TURNS_STOP_REASON,
        unit="turns",
        observed=lambda tally: tally.turns,
    ),
    LimitKind(
        name="max_token_budget",
        reason=MAX_TOKEN_BUDGET_STOP_REASON,
        unit="tokens",
        observed=lambda tally: tally.usage.total,
    ),
)
"""Every limit, in the order in which one reason is chosen when several are reached at once."""

KIND: Final[Mapping[str, LimitKind]] = {kind.name: kind for kind in KINDS}
STOP_REASONS: Final = tuple(kind.reason for kind in KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The caps of one agent. `None` means that there is no such cap.

    Raises:
        ValueError: A cap is not a positive whole number.
    """

    max_iterations: int | None = field(
        default=None,
        metadata={
            "help": "Turns per leg of an invocation; starts again at every resume leg and after "
            "a context overflow."
        },
    )
    max_turns: int | None = field(
        default=None,
        metadata={
            "help": "Turns (model responses with their tools) per invocation, over all legs."
        },
    )
    max_token_budget: int | None = field(
        default=None,
        metadata={"help": "Input and output tokens per invocation, every retry included."},
    )

    def __post_init__(self) -> None:
        """Refuse a value that could quietly mean "no limit"."""
        for name, value in self.items():
            require_positive_integer(name, value)

    def items(self) -> Iterator[tuple[str, Any]]:
        """The caps that are set, by name."""
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if value is not None:
                yield spec.name, value

    def over(self, base: Limits) -> Limits:
        """These caps, and `base`'s where this one has none."""
        return dataclasses.replace(base, **dict(self.items()))

    def levels(self, tally: Tally) -> tuple[Level, ...]:
        """How much of each cap that is set `tally` has used."""
        return tuple(
            Level(kind.name, cap, kind.observed(tally))
            for kind in KINDS
            if (cap := getattr(self, kind.name)) is not None
        )

    def breaches(self, tally: Tally) -> tuple[Breach, ...]:
        """Every limit that `tally` has reached, the one that decides the stop reason first."""
        return tuple(
            Breach(kind.name, cap, observed, kind.reason)
            for kind in KINDS
            if (cap := getattr(self, kind.name)) is not None
            and (observed := kind.observed(tally)) >= cap
        )


NO_LIMITS: Final = Limits()


def require_positive_integer(name: str, value: object) -> int:
    """Return `value`, or explain why it cannot be a cap.

    Raises:
        ValueError: `value` is no whole number of 1 or more. `True` is no number here.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"{name} must be a whole number of 1 or more, got {value!r}. "
            f"Leave it unset for no such limit."
        )
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What applies to one agent: its limits, and what is done when one is reached."""

    limits: Limits = NO_LIMITS
    action: Action = "halt"
    unmeasured: Unmeasured = "estimate"

    def breaches(self, tally: Tally) -> tuple[Breach, ...]:
        """Every limit that `tally` has reached, the one that decides the stop reason first.

        With `unmeasured="halt"`, one call of unknown size breaches every limit on tokens.
        """
        breaches = self.limits.breaches(tally)
        if self.unmeasured == "halt" and tally.unmeasured_calls:
            named = {breach.limit for breach in breaches}
            breaches += tuple(
                Breach(kind.name, cap, kind.observed(tally), kind.reason)
                for kind in KINDS
                if kind.unit == "tokens"
                and kind.name not in named
                and (cap := getattr(self.limits, kind.name)) is not None
            )
        return breaches


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return `value`, or list what it may be.

    Raises:
        ValueError: `value` is none of `choices`.
    """
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")
    return str(value)
