"""Which limits there are, in one table, and the caps of one agent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypedDict

from otel_limits.core.values import (
    CALLS_PER_TOOL,
    CAP,
    MONEY,
    SECONDS,
    SWITCHABLE_CAP,
    Kind,
)

if TYPE_CHECKING:
    from otel_limits.core.quota_state import QuotaRefusal
    from otel_limits.core.usage import Number, Tally

MAX_ITERATIONS_STOP_REASON: Final = "max_iterations"
MAX_TURNS_STOP_REASON: Final = "max_turns"
MAX_MODEL_CALLS_STOP_REASON: Final = "max_model_calls"
MAX_TOKEN_BUDGET_STOP_REASON: Final = "max_token_budget"  # noqa: S105  a reason, no password
MAX_INPUT_TOKENS_STOP_REASON: Final = "max_input_tokens"
MAX_OUTPUT_TOKENS_STOP_REASON: Final = "max_output_tokens"
MAX_TOOL_CALLS_STOP_REASON: Final = "max_tool_calls"
MAX_COST_STOP_REASON: Final = "max_cost_usd"
MAX_DURATION_STOP_REASON: Final = "max_duration"
LOOP_DETECTED_STOP_REASON: Final = "loop_detected"
QUOTA_EXCEEDED_STOP_REASON: Final = "quota_exceeded"
QUOTA_UNAVAILABLE_STOP_REASON: Final = "quota_unavailable"
KILLED_STOP_REASON: Final = "killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One limit: what it caps, how its cap is written, and how it is told."""

    name: str
    """Its field of `Limits`; the variable, the option and the key of the policy file follow."""
    reason: str
    """The stop reason that it leads to."""
    unit: str
    help: str
    observed: Callable[[Tally], Number]
    """What of a tally is measured by the cap."""
    kind: Kind[Any] = CAP
    """How the cap is read."""
    is_refusal: bool = False
    """True when a call beyond it is refused before it runs, and the refusal is the breach."""
    yields_to_output: bool = False
    """True when the call that only forces structured output is still permitted."""
    in_tree: bool = True
    """True when it makes sense for a whole budget tree."""
    leaves_room: bool = True
    """False when not even a last answer may pass it."""
    binds_side_calls: bool = False
    """True when a model call can pass it that is not a turn."""

    @property
    def tree_help(self) -> str:
        """`help` for the limit of a budget tree."""
        help_text = self.help.replace(", across all legs", "")
        return help_text.replace("per invocation", "across the whole budget tree")


def _whole_milliseconds(tally: Tally) -> float:
    # upwards, or whoever looks when the time is up, and looks once, may find some left
    return math.ceil(tally.seconds * 1000) / 1000


def _in_no_tally(tally: Tally) -> Number:
    # a tally does not tell tools apart: a run looks at its calls by tool instead
    raise NotImplementedError(tally)


def _loop_limit(name: str, unit: str, help: str) -> Limit:  # noqa: A002  as the field
    return Limit(
        name=name,
        reason=LOOP_DETECTED_STOP_REASON,
        unit=unit,
        help=f"{help}; 0 turns it off.",
        observed=attrgetter(name.removeprefix("max_")),
        kind=SWITCHABLE_CAP,
        # Two agents that make the same call do not go round in a circle.
        in_tree=False,
    )


LIMITS: Final[Mapping[str, Limit]] = {
    limit.name: limit
    for limit in (
        Limit(
            name="max_iterations",
            reason=MAX_ITERATIONS_STOP_REASON,
            unit="turns",
            help="Turns per leg (between resumes or context overflows).",
            observed=attrgetter("iterations"),
            # A response that ended the leg may still be followed by the one call that forces its
            # output.
            yields_to_output=True,
            in_tree=False,
        ),
        Limit(
            name="max_turns",
            reason=MAX_TURNS_STOP_REASON,
            unit="turns",
            help="Turns per invocation, across all legs.",
            observed=attrgetter("turns"),
        ),
        Limit(
            name="max_model_calls",
            reason=MAX_MODEL_CALLS_STOP_REASON,
            unit="model calls",
            help="Model calls per invocation, including retries, failures, structured output and "
            "summaries.",
            observed=attrgetter("model_calls"),
            # A last answer would be one more of them.
            leaves_room=False,
            binds_side_calls=True,
        ),
        Limit(
            name="max_token_budget",
            reason=MAX_TOKEN_BUDGET_STOP_REASON,
            unit="tokens",
            help="Input and output tokens per invocation, including retries.",
            observed=attrgetter("tokens"),
            binds_side_calls=True,
        ),
        Limit(
            name="max_input_tokens",
            reason=MAX_INPUT_TOKENS_STOP_REASON,
            unit="input tokens",
            help="Input tokens per invocation, including cached ones.",
            observed=attrgetter("input"),
            binds_side_calls=True,
        ),
        Limit(
            name="max_output_tokens",
            reason=MAX_OUTPUT_TOKENS_STOP_REASON,
            unit="output tokens",
            help="Output tokens per invocation.",
            observed=attrgetter("output"),
            binds_side_calls=True,
        ),
        Limit(
            name="max_tool_calls",
            reason=MAX_TOOL_CALLS_STOP_REASON,
            unit="calls",
            help="Tool calls per invocation. Further calls are refused, then the agent halts.",
            observed=attrgetter("tool_calls"),
            is_refusal=True,
        ),
        Limit(
            name="max_calls_per_tool",
            reason=MAX_TOOL_CALLS_STOP_REASON,
            unit="calls",
            help="Calls per tool and invocation, e.g. search=20,fetch=5 (in a file {search: 20}).",
            observed=_in_no_tally,
            kind=CALLS_PER_TOOL,
            is_refusal=True,
            in_tree=False,
        ),
        Limit(
            name="max_cost_usd",
            reason=MAX_COST_STOP_REASON,
            unit="USD",
            help="Cost per invocation, in USD.",
            observed=attrgetter("cost"),
            kind=MONEY,
            binds_side_calls=True,
        ),
        Limit(
            name="max_duration_seconds",
            reason=MAX_DURATION_STOP_REASON,
            unit="seconds",
            help="Duration per invocation, in seconds. In-flight model calls are canceled; running "
            "tools finish.",
            observed=_whole_milliseconds,
            kind=SECONDS,
            # There is no time in which a last answer could be written.
            leaves_room=False,
            binds_side_calls=True,
        ),
        _loop_limit(
            "max_consecutive_same_tool", "calls in a row", "Consecutive calls of one tool, per leg"
        ),
        _loop_limit(
            "max_identical_tool_calls",
            "identical calls",
            "Calls with the same tool, arguments and result within the last 20",
        ),
        _loop_limit(
            "max_repeated_tool_cycles",
            "repetitions",
            "Repetitions of a pattern of 2 to 5 calls with the same results",
        ),
        _loop_limit(
            "max_no_progress_turns",
            "turns without progress",
            "Consecutive turns without a new tool result or new text",
        ),
    )
}
"""Every limit by its name, in the order of their reasons.

A new limit is an entry here, a constant above, a field of `Limits` and of `Caps`, and whatever else
tests/test_limit_table.py names.
"""

LIMIT_NAMES: Final = tuple(LIMITS)
LOOP_LIMITS: Final = tuple(
    limit.name for limit in LIMITS.values() if limit.reason == LOOP_DETECTED_STOP_REASON
)
TREE_LIMITS: Final = tuple(limit.name for limit in LIMITS.values() if limit.in_tree)
TREE_PREFIX: Final = "tree_"

STOP_REASONS: Final = (
    *dict.fromkeys(limit.reason for limit in LIMITS.values()),
    QUOTA_EXCEEDED_STOP_REASON,
    QUOTA_UNAVAILABLE_STOP_REASON,
    KILLED_STOP_REASON,
)
"""Every stop reason of ours, in the order in which one is chosen out of several."""


@dataclass(frozen=True, slots=True)
class Level:
    """How much of one limit has been used."""

    limit: str
    cap: Number
    observed: Number

    @property
    def ratio(self) -> float:
        """Fraction of the cap; 1 when it is reached."""
        # Through float, as a cap may be a Decimal and what was used an int: a ratio is not money.
        return float(self.observed) / float(self.cap)


@dataclass(frozen=True, slots=True)
class Breach:
    """The event that a limit was reached."""

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
    reserved: Number = 0
    """How much of `observed` is not used yet, but reserved by model calls under way."""
    quota: QuotaRefusal | None = None
    """How the quota stood, where one refused."""
    origin: str = field(default="", compare=False)
    """Where the limit is set, such as `OTEL_LIMITS_MAX_TURNS` or `limits.yaml:12`; empty where that
    is not known."""

    @property
    def amount(self) -> str:
        """How much was used of what is permitted, in words."""
        # The limit of a tree is the one of the same name, with a prefix.
        kind = LIMITS.get(self.limit.removeprefix(TREE_PREFIX))
        if kind is not None and kind.is_refusal:  # `observed` counts the call that did not run
            return f"{self.cap} of {self.cap} {self.unit} used, and one more was asked for"
        if self.reason == LOOP_DETECTED_STOP_REASON:
            return f"{self.observed} of {self.cap} {self.unit}"
        if not self.reserved:
            return f"{self.observed} of {self.cap} {self.unit} used"
        used = self.observed - self.reserved  # type: ignore[operator]  # both are of one kind
        return (
            f"{self.observed} of {self.cap} {self.unit}: {used} used, {self.reserved} reserved by "
            "model calls under way"
        )

    @property
    def yields_to_output(self) -> bool:
        """True when the call that only forces structured output is still permitted."""
        # That of a tree never does: its other agents are not forcing any output.
        return self.limit in LIMITS and LIMITS[self.limit].yields_to_output

    @property
    def leaves_room(self) -> bool:
        """True when a last answer may pass the limit."""
        kind = LIMITS.get(self.limit.removeprefix(TREE_PREFIX))
        return kind is None or kind.leaves_room

    @property
    def binds_side_calls(self) -> bool:
        """True when a model call that the agent's loop does not make would pass the limit."""
        kind = LIMITS.get(self.limit.removeprefix(TREE_PREFIX))
        return kind is not None and kind.binds_side_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The caps of one agent. `None` means that there is no such cap.

    A limit of N permits exactly N: the N-th response is taken, then the agent is halted. Tokens
    and cost are known after a call, so they are passed by one call at most.

    Raises:
        ValueError: A cap is out of its bounds.
    """

    max_iterations: int | None = None
    max_turns: int | None = None
    max_model_calls: int | None = None
    max_token_budget: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    max_calls_per_tool: Mapping[str, int] | None = None
    max_cost_usd: Decimal | float | None = None
    """Kept as a `Decimal`; a float counts by its shortest decimal form, so 0.1 is a tenth."""
    max_duration_seconds: float | None = None
    max_consecutive_same_tool: int | None = None
    max_identical_tool_calls: int | None = None
    max_repeated_tool_cycles: int | None = None
    max_no_progress_turns: int | None = None
    active: tuple[tuple[Limit, Number], ...] = field(
        init=False, repr=False, compare=False, default=()
    )
    """The limits that measure a tally, with their caps."""

    def __post_init__(self) -> None:
        """Refuse a value that could quietly mean "no limit"."""
        for name, value in self.items():
            object.__setattr__(self, name, LIMITS[name].kind.of_value(name, value))
        caps = ((LIMITS[name], cap) for name, cap in self.items())
        # 0 switches a loop limit off. Caps of single tools are asked where tools are admitted, as
        # no tally tells tools apart.
        active = tuple((limit, cap) for limit, cap in caps if cap and not isinstance(cap, Mapping))
        object.__setattr__(self, "active", active)

    def __reduce__(self) -> tuple[Any, ...]:
        """Be pickled and copied as the caps alone: the table of limits holds functions."""
        return _limits_of, (dict(self.items()),)

    def items(self) -> Iterator[tuple[str, Any]]:
        """The caps that are set, by name."""
        # By the table and not by the fields: its order is the one in which limits are shown.
        for name in LIMIT_NAMES:
            # A limit of the table without a field is unset: a test names it, no import fails.
            value = getattr(self, name, None)
            if value is not None:
                yield name, value

    def merged_over(self, base: Limits) -> Limits:
        """These caps, and `base`'s where this one has none; caps of single tools one by one."""
        caps = dict(base.items())
        for name, cap in self.items():
            # Merged by tool: a cap for `fetch` in one place does not lift that for `search` in
            # another.
            below = caps.get(name)
            caps[name] = {**below, **cap} if isinstance(below, Mapping) else cap
        return Limits(**caps)

    def extended_by(self, tally: Tally, calls_by_tool: Mapping[str, int]) -> Limits:
        """Add to these caps what has been used already; one that is switched off stays so."""
        caps = dict(self.items())
        # Only what is active: 0 switches a loop limit off, and 0 with what was used would switch it
        # on.
        for limit, _ in self.active:
            caps[limit.name] += limit.observed(tally)
        if self.max_calls_per_tool is not None:
            caps["max_calls_per_tool"] = {
                tool: calls_by_tool.get(tool, 0) + cap
                for tool, cap in self.max_calls_per_tool.items()
            }
        return Limits(**caps)

    def levels(self, tally: Tally, prefix: str = "") -> tuple[Level, ...]:
        """How much of each cap `tally` has used."""
        levels = []
        for limit, cap in self.active:  # no comprehension, which would be a frame more
            levels.append(Level(prefix + limit.name, cap, limit.observed(tally)))
        return tuple(levels)

    def breaches(
        self, tally: Tally, prefix: str = "", reserved: Tally | None = None
    ) -> tuple[Breach, ...]:
        """Every limit that `tally`, with what is reserved beside it, has reached."""
        breaches: tuple[Breach, ...] = ()
        for limit, cap in self.active:
            # What would pass it is refused before it runs, so that what was counted says nothing.
            if limit.is_refusal:
                continue
            observed = limit.observed(tally)
            # The same reader for both, so that no limit can forget what is reserved.
            held = 0 if reserved is None else limit.observed(reserved)
            if observed + held >= cap:  # type: ignore[operator]  # both are of one kind
                breaches += (
                    Breach(
                        prefix + limit.name,
                        cap,
                        observed + held,  # type: ignore[operator]
                        limit.reason,
                        limit.unit,
                        reserved=held,
                    ),
                )
        return breaches


class Caps(TypedDict, total=False):
    """The caps of `Limits` as keyword arguments."""

    max_iterations: int | None
    max_turns: int | None
    max_model_calls: int | None
    max_token_budget: int | None
    max_input_tokens: int | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    max_calls_per_tool: Mapping[str, int] | None
    max_cost_usd: Decimal | float | None
    max_duration_seconds: float | None
    max_consecutive_same_tool: int | None
    max_identical_tool_calls: int | None
    max_repeated_tool_cycles: int | None
    max_no_progress_turns: int | None


def _limits_of(caps: Mapping[str, Any]) -> Limits:
    return Limits(**caps)


NO_LIMITS: Final = Limits()


def require_limits(name: str, limits: object) -> Limits:
    """Return an argument that has to be `Limits`.

    Raises:
        ValueError: It is not: a dictionary, for example, as Strands' own `limits=` takes one.
    """
    if isinstance(limits, Limits):
        return limits
    raise ValueError(f"{name} must be Limits, such as Limits(max_turns=30), got {limits!r:.100}.")


def require_tree(limits: object) -> Limits:
    """Return `limits`, if a whole budget tree can have them.

    Raises:
        ValueError: One of them makes no sense for a tree.
    """
    limits = require_limits("tree", limits)
    foreign = [name for name, _ in limits.items() if name not in TREE_LIMITS]
    if foreign:
        raise ValueError(
            f"{foreign[0]} is not a limit of a budget tree. It can have: {', '.join(TREE_LIMITS)}."
        )
    return limits
