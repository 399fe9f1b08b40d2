"""The table of all limits, the caps of one agent, and where each of them is set."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypedDict, TypeVar, cast

from otel_limits.core.secrets import quote_value
from otel_limits.core.values import (
    CALLS_PER_TOOL,
    CAP,
    MONEY,
    SECONDS,
    SWITCHABLE_CAP,
    SWITCHABLE_CAPS_PER_TOOL,
    Kind,
)
from otel_limits.core.wording import pluralize, shortest, suggestion

if TYPE_CHECKING:
    from otel_limits.core.usage import Number, QuotaRefusal, Tally

Method = TypeVar("Method", bound=Callable[..., Any])


MAX_ITERATIONS_STOP_REASON: Final = "max_iterations"
MAX_TURNS_STOP_REASON: Final = "max_turns"
MAX_MODEL_CALLS_STOP_REASON: Final = "max_model_calls"
MAX_TOKEN_BUDGET_STOP_REASON: Final = "max_token_budget"  # noqa: S105  not a password
MAX_INPUT_TOKENS_STOP_REASON: Final = "max_input_tokens"
MAX_OUTPUT_TOKENS_STOP_REASON: Final = "max_output_tokens"
MAX_TOOL_CALLS_STOP_REASON: Final = "max_tool_calls"
MAX_COST_STOP_REASON: Final = "max_cost_usd"
MAX_DURATION_STOP_REASON: Final = "max_duration"
LOOP_DETECTED_STOP_REASON: Final = "loop_detected"
QUOTA_EXCEEDED_STOP_REASON: Final = "quota_exceeded"
QUOTA_UNAVAILABLE_STOP_REASON: Final = "quota_unavailable"
KILLED_STOP_REASON: Final = "killed"

REPEATED_FAILURES: Final = "max_repeated_failures"

TREE: Final = "tree"
CONVERSATION: Final = "conversation"

ACROSS: Final[Mapping[str, str]] = {
    TREE: "across the whole budget tree",
    CONVERSATION: "per conversation",
}
"""How far a shared limit reaches, in words."""

TREE_PREFIX: Final = f"{TREE}_"
CONVERSATION_PREFIX: Final = f"{CONVERSATION}_"
"""Of the names of their limits."""

USD: Final = "USD"
"""Unit of limits on cost."""


@dataclass(frozen=True, slots=True)
class _OfTool:
    """Returns the value of one tool; equal for the same tool, unlike a function."""

    counts: Callable[[Tally], Mapping[str, int]]
    tool: str

    def __call__(self, tally: Tally) -> int:
        return self.counts(tally).get(self.tool, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One limit: what it caps, how its cap is parsed and how it is shown."""

    name: str
    """Its field of `Limits`, from which variable, option and policy key are derived."""
    reason: str
    """The stop reason of its halts."""
    unit: str
    help: str
    observed: Callable[[Tally], Any]
    """Returns the capped value of a tally, or its values by tool."""
    kind: Kind[Any] = CAP
    """How the cap is parsed."""
    is_refusal: bool = False
    """True if a call beyond the cap is refused before it runs, and the refusal is the breach."""
    yields_to_output: bool = False
    """True if the call that only forces structured output is still allowed."""
    in_tree: bool = True
    """True if it can apply to a whole budget tree."""
    in_conversation: bool = False
    """True if it can apply to a whole conversation."""
    leaves_room: bool = True
    """False if not even a final answer may exceed it."""
    binds_side_calls: bool = False
    """True if a side call can exceed it."""
    per_leg: bool = False
    """True if each leg, and so each answer to an interrupt, has its own count."""
    subject: str | None = None
    """The tool, in the limit of one tool that `of_tool` returns."""

    def of_tool(self, tool: str) -> Limit:
        """Return the limit of one tool, of a limit whose value counts by tool."""
        return replace(self, subject=tool, observed=_OfTool(self.observed, tool))

    def help_across(self, shared: str) -> str:
        """Return `help` for the same limit of a budget tree or a conversation, without details."""
        help_text = re.sub(r", including [^.]+", "", self.help)
        return help_text.replace("per invocation", ACROSS[shared])


def _whole_milliseconds(tally: Tally) -> float:
    # rounded up, so that a check exactly at the deadline finds no time left
    return math.ceil(tally.seconds * 1000) / 1000


def _in_no_tally(tally: Tally) -> Number:
    # no tally counts calls by tool: the run checks them where tools are admitted
    raise NotImplementedError(tally)


def _loop_limit(
    name: str,
    unit: str,
    help: str,  # noqa: A002  named like the field
    kind: Kind[Any] = SWITCHABLE_CAP,
) -> Limit:
    return Limit(
        name=name,
        reason=LOOP_DETECTED_STOP_REASON,
        unit=unit,
        help=f"{help}; 0 turns it off.",
        observed=attrgetter(name.removeprefix("max_")),
        kind=kind,
        # Two agents that make the same call are not a loop.
        in_tree=False,
    )


LIMITS: Final[Mapping[str, Limit]] = {
    limit.name: limit
    for limit in (
        Limit(
            name="max_iterations",
            reason=MAX_ITERATIONS_STOP_REASON,
            unit="turns",
            help="Turns per pass of the agent loop; resumes restart it.",
            observed=attrgetter("iterations"),
            # One more call may force the output after the response that ended the leg.
            yields_to_output=True,
            in_tree=False,
            per_leg=True,
        ),
        Limit(
            name="max_turns",
            reason=MAX_TURNS_STOP_REASON,
            unit="turns",
            help="Turns per invocation, including after resumes.",
            observed=attrgetter("turns"),
            in_conversation=True,
        ),
        Limit(
            name="max_model_calls",
            reason=MAX_MODEL_CALLS_STOP_REASON,
            unit="model calls",
            help="Model calls per invocation, including retries, failures, structured output and "
            "summaries.",
            observed=attrgetter("model_calls"),
            in_conversation=True,
            # A final answer would be one more call.
            leaves_room=False,
            binds_side_calls=True,
        ),
        Limit(
            name="max_token_budget",
            reason=MAX_TOKEN_BUDGET_STOP_REASON,
            unit="tokens",
            help="Input and output tokens per invocation, including retries.",
            observed=attrgetter("tokens"),
            in_conversation=True,
            binds_side_calls=True,
        ),
        Limit(
            name="max_input_tokens",
            reason=MAX_INPUT_TOKENS_STOP_REASON,
            unit="input tokens",
            help="Input tokens per invocation, with cached ones.",
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
            unit="tool calls",
            help="Tool calls per invocation. Further calls are refused, then the agent halts.",
            observed=attrgetter("tool_calls"),
            in_conversation=True,
            is_refusal=True,
        ),
        Limit(
            name="max_calls_per_tool",
            reason=MAX_TOOL_CALLS_STOP_REASON,
            unit="tool calls",
            help="Calls per tool and invocation, e.g. search=20,fetch=5 (in a file {search: 20}).",
            observed=_in_no_tally,
            kind=CALLS_PER_TOOL,
            is_refusal=True,
            in_tree=False,
        ),
        Limit(
            name="max_cost_usd",
            reason=MAX_COST_STOP_REASON,
            unit=USD,
            help="Cost per invocation, in USD.",
            observed=attrgetter("cost_at_most"),
            in_conversation=True,
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
            # There is no time left for a final answer.
            leaves_room=False,
            binds_side_calls=True,
        ),
        _loop_limit(
            "max_consecutive_same_tool",
            "calls in a row",
            "Consecutive calls of one tool, per pass of the loop",
        ),
        _loop_limit(
            "max_identical_tool_calls",
            "identical calls",
            "Calls with the same tool, arguments and result in the last 20",
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
        _loop_limit(
            "max_consecutive_tool_failures",
            "failing turns",
            "Consecutive turns in which every tool call failed",
        ),
        _loop_limit(
            "max_consecutive_failures_per_tool",
            "failing turns",
            "The same for single tools, e.g. ssh=3 (in a file {ssh: 3})",
            SWITCHABLE_CAPS_PER_TOOL,
        ),
        _loop_limit(
            "max_consecutive_handoffs",
            "hand-offs in a row",
            "Consecutive hand-offs between agents, without another tool",
        ),
        replace(
            _loop_limit(
                REPEATED_FAILURES,
                "failures in a row",
                "Consecutive invocations with the same input and failure",
            ),
            # It is reached before the first model call.
            leaves_room=False,
            binds_side_calls=True,
        ),
    )
}
"""Every limit by its name, in the order of their stop reasons.

A new limit is an entry here, a constant above, a field of `Limits` and of `Caps`, and whatever else
tests/unit/core/test_limits.py reports.
"""

LIMIT_NAMES: Final = tuple(LIMITS)
LOOP_LIMITS: Final = tuple(
    limit.name for limit in LIMITS.values() if limit.reason == LOOP_DETECTED_STOP_REASON
)
SHARED_LIMITS: Final[Mapping[str, tuple[str, ...]]] = {
    TREE: tuple(limit.name for limit in LIMITS.values() if limit.in_tree),
    CONVERSATION: tuple(limit.name for limit in LIMITS.values() if limit.in_conversation),
}
"""The limits of budget trees and of conversations."""

EXTENDABLE: Final = (
    *LIMIT_NAMES,
    *(CONVERSATION_PREFIX + name for name in SHARED_LIMITS[CONVERSATION]),
)
"""The limits that an answer of a person can raise: of an invocation, or of its conversation."""

STOP_REASONS: Final = (
    *dict.fromkeys(limit.reason for limit in LIMITS.values()),
    QUOTA_EXCEEDED_STOP_REASON,
    QUOTA_UNAVAILABLE_STOP_REASON,
    KILLED_STOP_REASON,
)
"""Every stop reason of otel-limits, by precedence."""


def without_prefix(limit: str) -> str:
    """Return the name of a limit without the prefix of a shared one."""
    return limit.removeprefix(TREE_PREFIX).removeprefix(CONVERSATION_PREFIX)


def kind_of(limit: str) -> Limit | None:
    """Return the entry of a limit, also of one that is shared; `None` if it has none."""
    return LIMITS.get(without_prefix(limit))


@dataclass(frozen=True, slots=True)
class Level:
    """The utilization of one limit."""

    limit: str
    cap: Number
    observed: Number
    at_most: bool = False
    """True if `observed` contains upper bounds of unknown prices."""
    resumes: int = 0
    """Answers to interrupts that `observed` counts across."""

    @property
    def ratio(self) -> float:
        """Fraction of the cap; 1 when the limit is reached."""
        # As floats, because a Decimal cap and an int cannot be divided.
        return float(self.observed) / float(self.cap)


@dataclass(frozen=True, slots=True)
class Breach:
    """A limit that was reached."""

    limit: str
    """Name of the limit, such as `max_turns`, or `tree_max_turns` for a budget tree, or
    `conversation_max_turns`."""
    cap: Number
    """The cap."""
    observed: Number
    """The count when the limit was reached; never below `cap`."""
    reason: str
    """The stop reason of the halt."""
    unit: str = ""
    """Unit of the count, such as `turns`."""
    subject: str | None = None
    """The tool concerned, if any."""
    note: str = ""
    """Half a sentence that replaces count and cap, if there is one."""
    error: str = ""
    """The first line of the tool's last error, if its failures are the reason."""
    uncounted: bool = False
    """True if the cap was not reached, but cannot count a call."""
    reserved: Number = 0
    """The part of `observed` that in-flight model calls have reserved but not used."""
    at_most: bool = False
    """True if `observed` contains upper bounds of unknown prices."""
    quota: QuotaRefusal | None = None
    """The state of the quota that refused, if one did."""
    origin: str = field(default="", compare=False)
    """Where the limit is set, such as `OTEL_LIMITS_MAX_TURNS` or `limits.yaml:12`; empty if
    unknown."""
    resumes: int = 0
    """Answers to interrupts that `observed` counts across."""

    @property
    def amount(self) -> str:
        """Usage and cap, in words."""
        kind = kind_of(self.limit)
        if kind is not None and kind.is_refusal:  # `observed` includes the refused call
            by = over_resumes(self, "by")
            return f"{self.cap} of {self.cap} {self.unit} used{by}, and one more was requested"
        if self.reason == LOOP_DETECTED_STOP_REASON:
            return f"{self.observed} of {self.cap} {self.unit}{over_resumes(self, 'in')}"
        at_most = "at most " if self.at_most else ""
        amount = f"{at_most}{shortest(self.observed)} of {self.cap} {self.unit}"
        if not self.reserved:
            return f"{amount} used{over_resumes(self, 'by')}"
        paid = self.observed - self.reserved  # type: ignore[operator]  # of the same type
        return (
            f"{amount}: {at_most}{shortest(paid)} used{over_resumes(self, 'by')}, "
            f"{shortest(self.reserved)} reserved by in-flight model calls"
        )

    @property
    def yields_to_output(self) -> bool:
        """True if the call that only forces structured output is still allowed."""
        # Never for a tree: its other agents are not forcing any output.
        return self.limit in LIMITS and LIMITS[self.limit].yields_to_output

    @property
    def leaves_room(self) -> bool:
        """True if a final answer may exceed the limit."""
        kind = kind_of(self.limit)
        return kind is None or kind.leaves_room

    @property
    def binds_side_calls(self) -> bool:
        """True if a side call would exceed the limit."""
        kind = kind_of(self.limit)
        return kind is not None and kind.binds_side_calls


def over_resumes(counted: Breach | Level, preposition: str) -> str:
    """Name what is counted if it began before the last resume, e.g. ` in this task, …`."""
    if not counted.resumes:
        return ""
    whole = "tree" if counted.limit.startswith(TREE_PREFIX) else "task"
    return f" {preposition} this {whole}, over {pluralize(counted.resumes, 'resume')}"


def explained(explain: Callable[[str, object], str | None]) -> Callable[[Method], Method]:
    """Let a method refuse some keyword arguments with an explanation, as Python's has none.

    Args:
        explain: Returns the explanation for the name and value of an argument; `None` if the
            method decides.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def refusing(self: Any, *arguments: Any, **options: Any) -> Any:
            for name, value in options.items():
                if (explanation := explain(name, value)) is not None:
                    raise TypeError(
                        f"{type(self).__name__}() got an unexpected keyword argument {name!r}. "
                        f"{explanation}"
                    )
            return method(self, *arguments, **options)

        return cast("Method", refusing)

    return decorate


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The caps of one agent; `None` for no cap.

    A limit of N allows exactly N: the N-th response is accepted, then the agent is halted. Tokens
    and cost are known after a call, so one call may exceed them.

    Raises:
        ValueError: A cap is out of range.
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
    max_consecutive_tool_failures: int | None = None
    max_consecutive_failures_per_tool: Mapping[str, int] | None = None
    max_consecutive_handoffs: int | None = None
    max_repeated_failures: int | None = None
    active: tuple[tuple[Limit, Number], ...] = field(
        init=False, repr=False, compare=False, default=()
    )
    """The limits that apply to a tally, with their caps."""

    def __post_init__(self) -> None:
        """Reject values that could quietly mean "no limit"."""
        for name, value in self.items():
            object.__setattr__(self, name, LIMITS[name].kind.of_value(name, value))
        # 0 disables a loop limit.
        active = tuple((limit, cap) for limit, cap in self._tallied() if cap)
        object.__setattr__(self, "active", active)

    def _tallied(self) -> Iterator[tuple[Limit, Any]]:
        """Yield the limits that a tally can reach, with their caps."""
        for name, cap in self.items():
            limit = LIMITS[name]
            if not isinstance(cap, Mapping):
                yield limit, cap
            elif not limit.is_refusal:
                yield from ((limit.of_tool(tool), each) for tool, each in cap.items())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the caps alone, because the table of limits contains functions."""
        return functools.partial(Limits, **dict(self.items())), ()

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield the caps that are set, by name."""
        # In the order of the table, in which limits are shown.
        for name in LIMIT_NAMES:
            # A limit of the table without a field is unset: a test reports it, rather than an
            # import failing.
            value = getattr(self, name, None)
            if value is not None:
                yield name, value

    def merged_over(self, base: Limits) -> Limits:
        """Return these caps over those of `base`; caps of single tools are merged one by one."""
        caps = dict(base.items())
        for name, cap in self.items():
            # Merged by tool: a cap for `fetch` in one place does not remove that for `search` in
            # another.
            below = caps.get(name)
            caps[name] = {**below, **cap} if isinstance(below, Mapping) else cap
        return Limits(**caps)

    def extended_by(self, tally: Tally, calls_by_tool: Mapping[str, int]) -> Limits:
        """Return these caps plus current usage; disabled ones stay disabled."""
        caps = dict(self.items())
        # Only active ones: 0 disables a loop limit, and adding usage would enable it.
        for limit, cap in self.active:
            now = cap + limit.observed(tally)
            caps[limit.name] = {**caps[limit.name], limit.subject: now} if limit.subject else now
        if self.max_calls_per_tool is not None:
            caps["max_calls_per_tool"] = {
                tool: calls_by_tool.get(tool, 0) + cap
                for tool, cap in self.max_calls_per_tool.items()
            }
        return Limits(**caps)

    def levels(self, tally: Tally, prefix: str = "") -> tuple[Level, ...]:
        """Return the utilization of each cap."""
        levels = []
        for limit, cap in self.active:  # a comprehension would add a stack frame
            at_most = limit.unit == USD and tally.has_bounds
            levels.append(Level(prefix + limit.name, cap, limit.observed(tally), at_most))
        return tuple(levels)

    def breaches(
        self, tally: Tally, prefix: str = "", reserved: Tally | None = None
    ) -> tuple[Breach, ...]:
        """Return every limit that `tally`, plus reservations, has reached."""
        breaches: tuple[Breach, ...] = ()
        for limit, cap in self.active:
            # Calls beyond it are refused before they run, so the count does not matter.
            if limit.is_refusal:
                continue
            observed = limit.observed(tally)
            # The same function for both, so that no limit can ignore reservations.
            held = 0 if reserved is None else limit.observed(reserved)
            if observed + held >= cap:
                breaches += (
                    Breach(
                        prefix + limit.name,
                        cap,
                        observed + held,
                        limit.reason,
                        limit.unit,
                        limit.subject,
                        reserved=held,
                        at_most=limit.unit == USD and tally.has_bounds,
                    ),
                )
        return breaches


def _nearest(name: str, _: object) -> str | None:
    return None if name in LIMITS else suggestion(name, LIMITS, "See: otel-limits docs limits")


# `dataclass` has made it.
Limits.__init__ = explained(_nearest)(Limits.__init__)  # type: ignore[method-assign]


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
    max_consecutive_tool_failures: int | None
    max_consecutive_failures_per_tool: Mapping[str, int] | None
    max_consecutive_handoffs: int | None
    max_repeated_failures: int | None


NO_LIMITS: Final = Limits()


def require_limits(name: str, limits: object) -> Limits:
    """Return an argument that must be `Limits`.

    Raises:
        ValueError: It is not, but a dictionary, for example, as in Strands' own `limits=`.
    """
    if isinstance(limits, Limits):
        return limits
    raise ValueError(
        f"{name} must be Limits, such as Limits(max_turns=30), got {quote_value(limits)}."
    )


def require_shared(shared: str, limits: object) -> Limits:
    """Return `limits` if they are valid for a whole budget tree or conversation.

    Raises:
        ValueError: One of them does not apply there.
    """
    limits, valid = require_limits(shared, limits), SHARED_LIMITS[shared]
    invalid = [name for name, _ in limits.items() if name not in valid]
    if invalid:
        what = "budget tree" if shared == TREE else shared
        raise ValueError(
            f"{invalid[0]} is not a limit of a {what}. It can have: {', '.join(valid)}."
        )
    return limits


# --- where a limit is set -------------------------------------------------------------------------

PACKAGE: Final = "otel_limits"

PREFIX: Final = "OTEL_LIMITS_"
"""The beginning of each variable's name."""

PRESET: Final = "preset "
"""The beginning of the origin of a limit that a preset sets."""

RUN: Final = "otel-limits run"
"""The command that an option belongs to, as the first words of its origin."""

EXTENSION: Final = "an answer"
"""The beginning of the origin of a limit that a person extended."""


def extended_origin(cap: Number | None, origin: str) -> str:
    """Return the origin of a limit that an answer extended.

    Args:
        cap: The cap until then, if there was one.
        origin: Where that is set, if known; or its origin, if an earlier answer extended it.
    """
    if cap is None or origin.startswith(EXTENSION):
        return origin or EXTENSION
    return f"{EXTENSION}, from {shortest(cap)}" + (f" in {origin}" if origin else "")


def setting_of(origin: str) -> str:
    """Return where a limit is set, also of one that an answer extended; empty if unknown."""
    return origin.partition(" in ")[2] if origin.startswith(EXTENSION) else origin


def caps_by_name(limits: Limits) -> dict[str, Any]:
    """Return each cap by its name, of single tools by `max_calls_per_tool.search`."""
    return {
        f"{name}.{tool}" if tool else name: each
        for name, cap in limits.items()
        for tool, each in (cap.items() if isinstance(cap, Mapping) else [("", cap)])
    }


def origins_of(limits: Limits, origin: str, prefix: str = "") -> dict[str, str]:
    """Return the origin of each cap, for caps of single tools by tool."""
    # By tool, as two places can each cap different tools, and both apply.
    return dict.fromkeys((prefix + name for name in caps_by_name(limits)), origin)


def file_name(path: str) -> str:
    """Return a path without its folders.

    Models and users read it, and the paths of a machine do not concern them.
    """
    return path.replace("\\", "/").rpartition("/")[2]


def _location(path: str, line: int) -> str:
    # ipykernel generates a file name for each cell: ipykernel_4711/1490997570.py.
    folders = path.replace("\\", "/").split("/")[:-1]
    if folders and folders[-1].startswith("ipykernel_"):
        return f"a cell of the notebook, line {line}"
    return f"{file_name(path)}:{line}"


def caller_location(entry_point: str) -> str:
    """Return the application's line that called this package, e.g. `app.py:12 (enable)`."""
    import inspect  # only needed for limits that are set in code

    # The first frame outside this package: `enable` may be called by the plugin.
    frame = inspect.currentframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] != PACKAGE:
            return f"{_location(frame.f_code.co_filename, frame.f_lineno)} ({entry_point})"
        frame = frame.f_back
    return entry_point
