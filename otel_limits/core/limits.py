"""What may be spent, what was spent, and the pure decision between the two."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Context, Decimal
from operator import attrgetter
from typing import Any, Final, Literal, TypeAlias

from otel_limits.core.frozen import FrozenDict
from otel_limits.core.globs import best_match

MAX_ITERATIONS_STOP_REASON: Final = "max_iterations"
MAX_TURNS_STOP_REASON: Final = "max_turns"
MAX_TOKEN_BUDGET_STOP_REASON: Final = "max_token_budget"  # noqa: S105  a reason, no password
MAX_INPUT_TOKENS_STOP_REASON: Final = "max_input_tokens"
MAX_OUTPUT_TOKENS_STOP_REASON: Final = "max_output_tokens"
MAX_TOOL_CALLS_STOP_REASON: Final = "max_tool_calls"
MAX_COST_STOP_REASON: Final = "max_cost_usd"
MAX_DURATION_STOP_REASON: Final = "max_duration"
LOOP_DETECTED_STOP_REASON: Final = "loop_detected"
QUOTA_EXCEEDED_STOP_REASON: Final = "quota_exceeded"
KILLED_STOP_REASON: Final = "killed"

STOP_REASONS: Final = (
    MAX_ITERATIONS_STOP_REASON,
    MAX_TURNS_STOP_REASON,
    MAX_TOKEN_BUDGET_STOP_REASON,
    MAX_INPUT_TOKENS_STOP_REASON,
    MAX_OUTPUT_TOKENS_STOP_REASON,
    MAX_TOOL_CALLS_STOP_REASON,
    MAX_COST_STOP_REASON,
    MAX_DURATION_STOP_REASON,
    LOOP_DETECTED_STOP_REASON,
    QUOTA_EXCEEDED_STOP_REASON,
    KILLED_STOP_REASON,
)
"""Every stop reason of ours, in the order in which one is chosen out of several."""

Action = Literal["observe", "halt", "wrap_up", "raise", "ask"]
ACTIONS: Final[tuple[Action, ...]] = ("observe", "halt", "wrap_up", "raise", "ask")

Unmeasured = Literal["estimate", "ignore", "halt"]
UNMEASURED: Final[tuple[Unmeasured, ...]] = ("estimate", "ignore", "halt")

Unpriced = Literal["warn", "halt"]
UNPRICED: Final[tuple[Unpriced, ...]] = ("warn", "halt")

Number: TypeAlias = int | float | Decimal
"""What is capped: whole turns, tokens and calls, seconds, or exact USD."""


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


NO_USAGE: Final = Usage()
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
    tool_calls: int = 0
    """Tool calls that ran; retries are the same call, refused and denied ones are none."""
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


@dataclass(frozen=True, slots=True)
class Level:
    """How much of one limit has been used."""

    limit: str
    cap: Number
    observed: Number

    @property
    def ratio(self) -> float:
        """Fraction of the cap; 1 when it is reached."""
        return float(self.observed) / float(self.cap)


@dataclass(frozen=True, slots=True)
class Breach:
    """The fact that a limit was reached."""

    limit: str
    """Name of the limit, such as `max_turns`, or `tree_max_turns` for that of a budget tree."""
    cap: Number
    """What the limit permits."""
    observed: Number
    """What was counted when the limit was found to be reached; never below `cap`."""
    reason: str
    """The stop reason that this breach leads to."""
    unit: str = ""
    """What is counted, such as `turns`."""
    subject: str | None = None
    """The tool that the breach is about, if it is about one."""
    note: str = ""
    """Half a sentence that says it better than cap and observed value do, where there is one."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why an agent is stopped."""

    reason: str
    breaches: tuple[Breach, ...] = ()
    """Every limit that was reached, the one that decides first; none when it was killed."""
    action: Action | None = None
    """What is done about it; `None` for what the agent's policy says."""

    @property
    def breach(self) -> Breach | None:
        """The limit that decides."""
        return self.breaches[0] if self.breaches else None


KILLED: Final = Verdict(KILLED_STOP_REASON)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitKind:
    """One kind of limit: what it caps and how it is told."""

    name: str
    reason: str
    unit: str
    observed: Callable[[Tally], Number]
    yields_to_output: bool = False
    """True when the call that only forces structured output is still permitted."""
    in_tree: bool = True
    """True when it makes sense for a whole budget tree."""


KINDS: Final[tuple[LimitKind, ...]] = (
    LimitKind(
        name="max_iterations",
        reason=MAX_ITERATIONS_STOP_REASON,
        unit="turns",
        observed=attrgetter("iterations"),
        yields_to_output=True,
        in_tree=False,
    ),
    LimitKind(
        name="max_turns",
        reason=MAX_TURNS_STOP_REASON,
        unit="turns",
        observed=attrgetter("turns"),
    ),
    LimitKind(
        name="max_token_budget",
        reason=MAX_TOKEN_BUDGET_STOP_REASON,
        unit="tokens",
        observed=attrgetter("tokens"),
    ),
    LimitKind(
        name="max_input_tokens",
        reason=MAX_INPUT_TOKENS_STOP_REASON,
        unit="input tokens",
        observed=attrgetter("input"),
    ),
    LimitKind(
        name="max_output_tokens",
        reason=MAX_OUTPUT_TOKENS_STOP_REASON,
        unit="output tokens",
        observed=attrgetter("output"),
    ),
    LimitKind(
        name="max_cost_usd",
        reason=MAX_COST_STOP_REASON,
        unit="USD",
        observed=attrgetter("cost"),
    ),
    LimitKind(
        name="max_duration_seconds",
        reason=MAX_DURATION_STOP_REASON,
        unit="seconds",
        # upwards, or whoever looks when the time is up, and looks once, may find some left
        observed=lambda tally: math.ceil(tally.seconds * 1000) / 1000,
    ),
    LimitKind(
        name="max_consecutive_same_tool",
        reason=LOOP_DETECTED_STOP_REASON,
        unit="calls in a row",
        observed=attrgetter("consecutive_same_tool"),
        in_tree=False,
    ),
    LimitKind(
        name="max_identical_tool_calls",
        reason=LOOP_DETECTED_STOP_REASON,
        unit="identical calls",
        observed=attrgetter("identical_tool_calls"),
        in_tree=False,
    ),
    LimitKind(
        name="max_repeated_tool_cycles",
        reason=LOOP_DETECTED_STOP_REASON,
        unit="repetitions",
        observed=attrgetter("repeated_tool_cycles"),
        in_tree=False,
    ),
    LimitKind(
        name="max_no_progress_turns",
        reason=LOOP_DETECTED_STOP_REASON,
        unit="turns without progress",
        observed=attrgetter("no_progress_turns"),
        in_tree=False,
    ),
)
"""Every limit that is a comparison of a tally with a cap, in the order of their reasons.

`max_tool_calls` and `max_calls_per_tool` are not among them: a call beyond them is refused before
it runs, and the refusal is the breach.
"""

KIND: Final[Mapping[str, LimitKind]] = {kind.name: kind for kind in KINDS}
LOOP_LIMITS: Final = tuple(kind.name for kind in KINDS if kind.reason == LOOP_DETECTED_STOP_REASON)
TREE_LIMITS: Final = (*(kind.name for kind in KINDS if kind.in_tree), "max_tool_calls")
TREE_PREFIX: Final = "tree_"


def _cap(text: str) -> Any:
    """Declare a cap that is unset by default."""
    return field(default=None, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The caps of one agent. `None` means that there is no such cap.

    A limit of N permits exactly N: the N-th response is taken, then the agent is halted. Tokens
    and cost are known after a call, so they are passed by one call at most.

    Raises:
        ValueError: A cap is out of its bounds.
    """

    max_iterations: int | None = _cap(
        "Turns per leg of an invocation; starts again at every resume leg and after a "
        "context overflow."
    )
    max_turns: int | None = _cap(
        "Turns (model responses with their tools) per invocation, over all legs."
    )
    max_token_budget: int | None = _cap(
        "Input and output tokens per invocation, every retry included."
    )
    max_input_tokens: int | None = _cap("Input tokens per invocation, cached ones included.")
    max_output_tokens: int | None = _cap("Output tokens per invocation.")
    max_tool_calls: int | None = _cap(
        "Tool calls per invocation; a call beyond them is refused, then the agent is halted."
    )
    max_calls_per_tool: Mapping[str, int] | None = _cap(
        "Calls of single tools per invocation, as search=20,fetch=5."
    )
    max_cost_usd: Decimal | None = _cap("USD per invocation, by the price of each model call.")
    max_duration_seconds: float | None = _cap(
        "Seconds per invocation; a response under way is cancelled, a tool is waited for."
    )
    max_consecutive_same_tool: int | None = _cap(
        "Calls of one tool in a row, per leg; 0 switches it off."
    )
    max_identical_tool_calls: int | None = _cap(
        "Calls with equal tool, arguments and result within the last 20; 0 switches it off."
    )
    max_repeated_tool_cycles: int | None = _cap(
        "Repetitions of a pattern of 2 to 5 calls with the same results; 0 switches it off."
    )
    max_no_progress_turns: int | None = _cap(
        "Turns in a row that added no new tool result and no new text; 0 switches it off."
    )
    active: tuple[tuple[LimitKind, Number], ...] = field(
        init=False, repr=False, compare=False, default=()
    )
    """The kinds that are compared with a tally, with their caps."""

    def __post_init__(self) -> None:
        """Refuse a value that could quietly mean "no limit"."""
        for name, value in self.items():
            object.__setattr__(
                self, name, VALIDATORS.get(name, require_positive_integer)(name, value)
            )
        active = tuple((kind, cap) for kind in KINDS if (cap := getattr(self, kind.name)))
        object.__setattr__(self, "active", active)

    def items(self) -> Iterator[tuple[str, Any]]:
        """The caps that are set, by name."""
        for name in LIMIT_NAMES:
            value = getattr(self, name)
            if value is not None:
                yield name, value

    def over(self, base: Limits) -> Limits:
        """These caps, and `base`'s where this one has none; caps of single tools one by one."""
        caps = {**dict(base.items()), **dict(self.items())}
        if self.max_calls_per_tool and base.max_calls_per_tool:
            caps["max_calls_per_tool"] = {**base.max_calls_per_tool, **self.max_calls_per_tool}
        return Limits(**caps)

    def beyond(self, tally: Tally, calls_by_tool: Mapping[str, int]) -> Limits:
        """Add to these caps what has been used already; one that is switched off stays so."""
        caps = dict(self.items())
        for kind, _ in self.active:
            caps[kind.name] += kind.observed(tally)
        if self.max_tool_calls is not None:
            caps["max_tool_calls"] += tally.tool_calls
        if self.max_calls_per_tool is not None:
            caps["max_calls_per_tool"] = {
                tool: calls_by_tool.get(tool, 0) + cap
                for tool, cap in self.max_calls_per_tool.items()
            }
        return Limits(**caps)

    def levels(self, tally: Tally, prefix: str = "") -> tuple[Level, ...]:
        """How much of each cap `tally` has used."""
        levels = tuple(
            Level(prefix + kind.name, cap, kind.observed(tally)) for kind, cap in self.active
        )
        if self.max_tool_calls is not None:
            levels += (Level(prefix + "max_tool_calls", self.max_tool_calls, tally.tool_calls),)
        return levels

    def breaches(self, tally: Tally, prefix: str = "") -> tuple[Breach, ...]:
        """Every limit that `tally` has reached, the one that decides the stop reason first."""
        breaches: tuple[Breach, ...] = ()
        for kind, cap in self.active:
            observed = kind.observed(tally)
            if observed >= cap:
                name = prefix + kind.name
                breaches += (Breach(name, cap, observed, kind.reason, kind.unit),)
        return breaches


LIMIT_NAMES: Final = tuple(spec.name for spec in dataclasses.fields(Limits) if spec.init)


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


def require_switchable(name: str, value: object) -> int:
    """Return `value`, which may be 0 to switch the limit off.

    Raises:
        ValueError: `value` is no whole number of 0 or more.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(
            f"{name} must be a whole number of 1 or more, or 0 to switch it off, got {value!r}."
        )
    return value


def require_seconds(name: str, value: object) -> float:
    """Return `value` as seconds.

    Raises:
        ValueError: `value` is no finite number above 0.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type,operator]
        raise ValueError(f"{name} must be a number of seconds above 0, got {value!r}.")
    return value  # type: ignore[return-value]


def require_usd(name: str, value: object) -> Decimal:
    """Return `value` as an exact amount.

    Raises:
        ValueError: `value` is no finite amount above 0. A float is refused: it is not exact.
    """
    exact = isinstance(value, (int, Decimal)) and not isinstance(value, bool)
    if not exact or not Decimal(value).is_finite() or value <= 0:  # type: ignore[arg-type,operator]
        raise ValueError(
            f"{name} must be a Decimal of USD above 0, such as Decimal('0.50'), got {value!r}."
        )
    return Decimal(value)  # type: ignore[arg-type]


def require_calls_per_tool(name: str, value: object) -> Mapping[str, int]:
    """Return `value` as caps by tool name.

    Raises:
        ValueError: `value` is no mapping of tool names to whole numbers of 1 or more.
    """
    if not isinstance(value, Mapping) or not all(isinstance(tool, str) for tool in value):
        raise ValueError(
            f"{name} must map tool names to whole numbers, such as {{'search': 20}}, got {value!r}."
        )
    return FrozenDict(
        {tool: require_positive_integer(f"{name}[{tool!r}]", cap) for tool, cap in value.items()}
    )


VALIDATORS: Final[Mapping[str, Callable[[str, object], Any]]] = {
    "max_cost_usd": require_usd,
    "max_duration_seconds": require_seconds,
    "max_calls_per_tool": require_calls_per_tool,
    **dict.fromkeys(LOOP_LIMITS, require_switchable),
}

NO_LIMITS: Final = Limits()


def require_tree(limits: Limits) -> Limits:
    """Return `limits`, if a whole budget tree can have them.

    Raises:
        ValueError: One of them makes no sense for a tree.
    """
    foreign = [name for name, _ in limits.items() if name not in TREE_LIMITS]
    if foreign:
        raise ValueError(
            f"{foreign[0]} is no limit of a budget tree. It can have: {', '.join(TREE_LIMITS)}."
        )
    return limits


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return `value`, or list what it may be.

    Raises:
        ValueError: `value` is none of `choices`.
    """
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")
    return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What applies to one agent: its limits, and what is done when one is reached."""

    limits: Limits = NO_LIMITS
    tree: Limits = NO_LIMITS
    """Caps for an invocation and everything that it starts, held by the outermost one."""
    action: Action = "halt"
    unmeasured: Unmeasured = "estimate"
    unpriced: Unpriced = "warn"
    warn_at: tuple[float, ...] = ()
    """Soft thresholds, as fractions of a cap."""
    tell_model: bool = False
    """Tell the model with each call what is left."""
    nudge: bool = True
    """Tell the model once, one repetition before a loop limit, that it is repeating itself."""
    exempt_tools: frozenset[str] = frozenset()
    """Tools that loop limits don't look at: names or globs."""
    watched_tools: frozenset[str] = frozenset()
    """Names or globs of tools that loop limits look at where a wider glob exempts them."""

    def exempts(self, tool: str) -> bool:
        """Tell whether loop limits don't look at `tool`; the most specific glob decides."""
        glob = best_match((*self.exempt_tools, *self.watched_tools), tool)
        return glob in self.exempt_tools

    def breaches(self, tally: Tally) -> tuple[Breach, ...]:
        """Every limit that `tally` has reached, the one that decides the stop reason first.

        With `unmeasured="halt"` a call of unknown size breaches every limit on tokens, with
        `unpriced="halt"` a call of unknown price breaches that on cost.
        """
        breaches = self.limits.breaches(tally)
        if tally.unmeasured_calls and self.unmeasured == "halt":
            breaches += self._unknown(tally, breaches, "token")
        if tally.unpriced_calls and self.unpriced == "halt":
            breaches += self._unknown(tally, breaches, "USD")
        return breaches

    def _unknown(self, tally: Tally, known: tuple[Breach, ...], unit: str) -> tuple[Breach, ...]:
        named = {breach.limit for breach in known}
        return tuple(
            Breach(kind.name, cap, kind.observed(tally), kind.reason, kind.unit)
            for kind, cap in self.limits.active
            if unit in kind.unit and kind.name not in named
        )


def verdict_of(breaches: tuple[Breach, ...]) -> Verdict | None:
    """Decide on one stop reason; `None` when nothing was breached."""
    if not breaches:
        return None
    ordered = tuple(sorted(breaches, key=lambda breach: STOP_REASONS.index(breach.reason)))
    return Verdict(ordered[0].reason, ordered)
