"""The immutable events that observers receive, and a stop as JSON."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from otel_limits.core.limits import Breach
from otel_limits.core.usage import NO_COST, NO_USAGE, Number, QuotaRefusal, Usage
from otel_limits.core.values import FrozenDict

if TYPE_CHECKING:
    from otel_limits.core.limits import Level, Limits


ActionTaken = Literal["none", "observed", "halted", "wrapped_up", "raised", "killed"]
"""How otel-limits affected the end of an invocation."""

HALTED: Final = ("halted", "raised", "wrapped_up")
"""Actions that ended an invocation at a limit."""
CUT_SHORT: Final = (*HALTED, "killed")
"""Those, and kills: the invocation would have continued."""
CallKind = Literal["measured", "zero_token", "estimated", "unmeasured", "failed"]
"""How much is known about a model call. Both of an estimated and an unmeasured one, the provider
reported no usage; the latter counts no estimate. A halt is not a call and has no kind."""

ToolStatus = Literal["success", "error", "refused"]
"""How a tool call ended."""

TaskLoss = Literal["forgotten", "unknown"]
"""How it was found that the usage of an interrupted task is lost."""

Decision: TypeAlias = Literal[
    "admitted",
    "refused",
    "waited",
    "gave_up",
    "observed",
    "unpriced",
    "degraded_grace_admitted",
    "degraded_denied",
    "degraded_allowed",
    "degraded_local_admitted",
    "degraded_local_refused",
]
"""A quota's decision about a model call. `waited`: admitted after waiting; `gave_up`: refused after
waiting; `observed`: would have been refused; `unpriced`: a call that a quota in USD does not
count; `degraded_*`: made without the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """The invocation that an event belongs to."""

    agent: str
    id: str
    """Unique across processes and restarts."""
    root_id: str
    """The outermost invocation of its budget tree, possibly itself."""
    parent_id: str | None = None
    """The invocation that started it, if any."""
    trace_id: str | None = None
    """32 hexadecimal digits, or `None` if the invocation has no recorded span."""
    span_id: str | None = None
    """16 hexadecimal digits of the `invoke_agent` span."""
    sampled: bool = False
    """True if that span will be exported, so that links to the trace work."""
    task_id: str = ""
    """The first invocation of its task: each answer to an interrupt is a further one."""
    conversation: str = ""
    """Hash of its conversation, or of that of the invocation around it; empty if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """An invocation started."""

    invocation: Invocation
    limits: Limits
    action: ActionTaken
    """The action that will be taken at a limit."""
    unsampled: bool
    """True if its span did not reach the span processor, so it is tracked through hooks."""
    model: str | None = None
    """ID of the agent's model, if it has one."""
    session_id: str | None = None
    """The agent's session, if the framework has one."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    """Values of the audit keys, from the baggage or the agent."""
    at: float = field(default_factory=time.time)
    """Wall clock time, in seconds since the epoch."""
    tree: Mapping[str, Number] = field(default_factory=dict)
    """The caps of its budget trees, such as `tree_max_turns`; the tightest of several."""
    has_quotas: bool = False
    """True if quotas may apply to its model calls."""
    configured_action: str = "halt"
    """The configured action at a limit, such as `ask`."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where each cap is set, by its name; for one tool as `max_calls_per_tool.search`."""
    unpriced: str | None = None
    """Behavior for calls without a price, `warn` or `halt`; `None` without a limit in USD."""
    tools: frozenset[str] = frozenset()
    """The names and globs of tools that its limits name."""
    note: str = ""
    """A sentence about what the framework does not support for this invocation."""

    def __post_init__(self) -> None:
        """Copy the dictionaries, so that later changes don't affect the event."""
        for name in ("attributes", "tree", "origins"):
            object.__setattr__(self, name, FrozenDict(getattr(self, name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """An event loop cycle started, including replays of interrupted tools."""

    invocation: Invocation


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A model response was accepted into the conversation."""

    invocation: Invocation
    number: int
    """1 for the first turn of the invocation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """A request to a provider that has been settled."""

    invocation: Invocation
    number: int
    """1 for the first model call of the invocation."""
    model: str
    """Model ID as the provider knows it, or `unknown`."""
    kind: CallKind
    usage: Usage
    """Tokens as counted against the budget."""
    estimated: bool
    """True if `usage` is an estimate because the provider reported none."""
    span_id: str | None
    """16 hexadecimal digits of the `chat` span, if there is one."""
    seconds: float | None
    """Duration of the call, if known."""
    price: Decimal | None = None
    """USD, or `None` if the price is unknown: never a guess, never 0 for unknown."""
    price_at_most: Decimal | None = None
    """Upper bound of an unknown price, which limits and quotas in USD count; `None` if the price is
    known or there is no bound."""
    price_source: str | None = None
    """The source of the price, such as `policy`, `stated` or `genai-prices`."""
    price_version: str | None = None
    """Version of that source, so that the price can be checked later."""
    price_basis: str | None = None
    """Other pricing inputs than tokens and tier, as JSON; `None` if there are none."""
    unpriced: str | None = None
    """Why the price is unknown."""
    cache_saved: Decimal | None = None
    """USD saved by a cache, negative if writing cost more than reading saved; `None` if unknown or
    if it used no cache."""
    stated_cost: Decimal | None = None
    """USD that the response states: the price if `price_source` is `stated`, and else only
    recorded."""
    stated_by: str | None = None
    """The vendor that states it, by its name on the price list; `litellm_proxy` for a gateway."""
    stated_refused: str = ""
    """Why what the response states is not a cost of this call."""
    listed_price: Decimal | None = None
    """The price by the policy file or the list, for comparison with a stated cost, if known."""
    cost_is_limited: bool = False
    """True if a cost limit does not cover calls without a known price."""
    tier: str | None = None
    """The service tier it was billed at, such as `standard`, if known."""
    provider: str = "unknown"
    """The provider of the model, such as `bedrock`."""
    reported: Usage | None = None
    """Tokens exactly as the provider reported them; `None` if it reported none."""
    reported_total: int | None = None
    """The provider's own total, with or without cached tokens."""
    unknown_usage: tuple[str, ...] = ()
    """The provider's names of tokens in its usage whose meaning is unknown."""
    turn: int = 0
    """Number of the turn it was made for, shared by retries of a response."""
    iteration: int = 0
    """The same, counted per leg."""
    quota_operation: str | None = None
    """ID under which shared quotas count it; `None` if no quota applies."""
    quota_charges: str | None = None
    """The quota charges, for settling on behalf of a killed worker."""
    after_tools: Mapping[str, int] = field(default_factory=dict)
    """The tools whose results are new in its request, with their calls in the turn before; empty
    for a side call."""
    call_id: str = ""
    """Differs between concurrent calls of the loop; empty if it has one at a time."""
    side: bool = False
    """True for a call outside the agent loop: a summary, direct structured output, a model call by
    a tool, memory extraction, a background task. It may follow the `Stop`."""
    at: float = field(default_factory=time.time)
    """Wall clock time at which its end was seen, in seconds since the epoch."""

    @property
    def charge(self) -> Decimal | None:
        """USD that limits and quotas count: the price, or its upper bound."""
        return self.price_at_most if self.price is None else self.price

    def __post_init__(self) -> None:
        """Copy the tools, so that later changes don't affect the event."""
        object.__setattr__(self, "after_tools", FrozenDict(self.after_tools))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call requested by the model, in its final attempt."""

    invocation: Invocation
    number: int
    """1 for the first tool call of the invocation, in the order of the requests."""
    tool: str
    status: ToolStatus
    """`refused` if a limit blocked it; `error` also if no tool answered it: the application denied
    it, or no tool has its name."""
    seconds: float | None
    """Duration of that attempt; `None` if no tool ran, or if it continues in the background."""
    fingerprint: str | None
    """Hash of name, arguments and result: equal for equal calls, irreversible."""
    turn: int = 0
    """Number of the turn that requested it."""
    limit: str | None = None
    """The limit that refused it, or would have refused it if it were not only observed: then its
    status is that of a call that ran."""
    at: float = field(default_factory=time.time)
    """Wall clock time at which its end was seen, in seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitWarning:
    """A soft threshold of a limit was crossed: once per task, limit and threshold."""

    invocation: Invocation
    threshold: float
    """Fraction of the cap, such as 0.8."""
    level: Level


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedFailures:
    """Ten invocations in a row had the same input and failed in the same way, without a limit."""

    invocation: Invocation
    """The last one."""
    failures: int
    error: str
    """The class and the first line of the exception, or the stop reason of the halts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """A limit was reached: the agent was halted, or would have been (`observed`)."""

    invocation: Invocation
    reason: str
    """The stop reason."""
    breaches: tuple[Breach, ...]
    """Every limit that was reached, the deciding one first; none for a kill."""
    action: ActionTaken
    sentence: str = field(default="", compare=False)
    """The halt in one sentence: agent, limit, usage, where the limit is set, and the next step."""

    @property
    def breach(self) -> Breach | None:
        """The deciding limit."""
        return self.breaches[0] if self.breaches else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskUsage:
    """The usage of an invocation, and of those before it whose interrupts were answered."""

    id: str = ""
    """The ID of its first invocation."""
    resumes: int = 0
    """Answers to interrupts until now."""
    turns: int = 0
    model_calls: int = 0
    tool_calls: int = 0
    usage: Usage = NO_USAGE
    cost: Decimal = NO_COST
    """USD of the model calls with a known price."""
    unpriced_calls: int = 0
    """Model calls with tokens but without a known price."""
    seconds: float = 0.0
    """Time in which the agent ran, without the time in which it waited for answers."""


NO_TASK: Final = TaskUsage()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """How an invocation ended; published once per invocation."""

    reason: str
    """The stop reason of its result, `error` after an exception, `aborted` if the caller went away,
    `evicted` if it was removed as too old or one too many."""
    action: ActionTaken
    breach: Breach | None
    """The deciding limit, if any."""
    breaches: tuple[Breach, ...] = ()
    """Every limit that was reached, the deciding one first."""
    sentence: str = field(default="", compare=False)
    """The halt in one sentence, as in `Halt`."""
    turns: int = 0
    usage: Usage = NO_USAGE
    agent: str = ""
    trace_id: str | None = None
    invocation_id: str = ""
    cycles: int = 0
    model_calls: int = 0
    started: float = 0.0
    """Wall clock time at which the invocation started, in seconds since the epoch."""
    seconds: float = 0.0
    """Duration of the invocation."""
    tool_calls: int = 0
    cost: Decimal = NO_COST
    """USD of the model calls with a known price."""
    unpriced_calls: int = 0
    """Model calls with tokens but without a known price."""
    raised: bool = False
    """True if the halt or the kill was raised as an exception."""
    synthetic: bool = False
    """True if the halt or the kill added a message that no model wrote, to the result or to the
    conversation. In some frameworks, it does so before it raises an exception."""
    invocation: Invocation | None = field(default=None, compare=False)
    """Its position in the budget tree; not kept in the conversation."""
    levels: tuple[Level, ...] = field(default=(), compare=False)
    """Utilization of each configured limit."""
    task: TaskUsage = NO_TASK
    """The sums that limits count: those of all invocations of its task. The counts above are this
    invocation's part."""
    repeated_failures: int = field(default=0, compare=False)
    """Its number among the failures in a row with its input; 0 if it has not failed."""

    @property
    def quota(self) -> QuotaRefusal | None:
        """The state of the quota that ended the invocation, if one did."""
        return self.breach.quota if self.breach is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaDecision:
    """A quota decided about a model call."""

    invocation: Invocation
    quota: str
    key: str
    """The partition of the quota; values from outside appear as a hash."""
    decision: Decision
    wanted: Number
    """Maximum usage of the call."""
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaUse:
    """The state of one quota key in the current window, across all processes."""

    quota: str
    key: str
    unit: str
    used: Number
    reserved: Number
    """Reserved by in-flight calls."""
    limit: Number
    """The limit, including grants."""
    resets: float
    """End of the window, in seconds since the epoch; at least a day ahead if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaWait:
    """A model call starts or stops waiting for a quota."""

    invocation: Invocation
    quota: str
    key: str
    """The partition of the quota; values from outside appear as a hash."""
    seconds: float | None
    """Time spent waiting; `None` at the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaGrant:
    """A person granted, revoked, reset, set, unset, blocked or unblocked a quota key."""

    quota: str
    key: str
    change: Literal["grant", "revoke", "reset", "set", "unset", "block", "unblock"]
    amount: Number
    """The amount granted or set; 0 for any other change."""
    unit: str
    until: float | None
    """End of the grant, the set amount or the block, in seconds since the epoch."""
    by: str
    """User and host."""
    at: float
    """Time of the change, in seconds since the epoch."""
    id: str
    """Unique across all changes."""
    reason: str = ""
    """The reason given for a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLost:
    """The usage of an interrupted task is lost, so an answer begins a new task."""

    cause: TaskLoss
    """`forgotten`: dropped from memory before an answer; `unknown`: an answer came."""
    invocation: Invocation | None = None
    """The invocation that answers, if one does."""
    interrupts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class InternalError:
    """Something inside otel-limits failed; the agent was not affected."""

    component: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverDropped:
    """An observer lost events: it failed, or could not keep up."""

    observer: str
    events: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverLag:
    """The delay that an observer added at the end of an invocation."""

    observer: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRead:
    """A new version of the policy file was read."""

    path: str
    valid: bool
    """False if it was rejected, so that the previous version stays in effect."""
    loosened: tuple[str, ...] = ()
    """Settings, quotas and prices that are looser than in the previous version, or may be, one
    phrase each. A change that cannot be judged ends with `(not comparable)`."""
    changeable: bool = False
    """True if the user of this process, and so a tool of its agents, can change the file."""
    agents: tuple[str, ...] = ()
    """The names and globs of agents in the version in effect."""
    reloaded: bool = False
    """True if this process used a version before, which `loosened` compares with."""
    digest: str = ""
    """SHA-256 of the file, in hexadecimal digits; empty if it could not be read."""
    owner: str = ""
    """Owner of the file; empty if unknown. It may have been changed by another user."""
    modified: float | None = None
    """Modification time of the file, in seconds since the epoch."""
    at: float = field(default_factory=time.time)
    """Wall clock time, in seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Enforcing:
    """It was determined whether limits are enforced in this process."""

    source: str
    """How otel-limits was first enabled: `run`, `autoload`, `instrumentor`, `provider`, `code`,
    `parent` or `plugin`."""
    framework: str
    """The framework whose agents are meant, e.g. `strands`, once it is imported. Empty: all agents
    of the process, also before a framework is imported."""
    in_force: bool
    """False if it is enabled but cannot halt these agents."""


Event: TypeAlias = (
    Started
    | Cycle
    | Turn
    | ModelCall
    | ToolCall
    | LimitWarning
    | RepeatedFailures
    | Halt
    | Stop
    | QuotaDecision
    | QuotaUse
    | QuotaWait
    | QuotaGrant
    | TaskLost
    | InternalError
    | ObserverDropped
    | ObserverLag
    | PolicyRead
    | Enforcing
)

Observer: TypeAlias = Callable[[Event], None]
"""A function that receives every event. Its exceptions are logged, counted and suppressed.

It may have two attributes. `component` is the name under which its errors are counted.
`subscribes_to` is a tuple of event types: it receives those, and every `Stop`. It can also be a
dictionary from event types to functions that handle them.
"""


# --- the stop as JSON -----------------------------------------------------------------------------
# As the last message of a halted invocation carries it.

MARKER: Final = "otel_limits"
"""Key of the stop under a message's `metadata["custom"]`, which is never sent to a model."""


QUOTA_NUMBERS: Final = ("used", "reserved", "limit")


def stop_to_json(stop: Stop) -> dict[str, Any]:
    """Return a stop as plain JSON values, with the deciding limit at the top."""
    values: dict[str, Any] = dataclasses.asdict(stop, dict_factory=_exact)
    breach = values.pop("breach") or {}
    # Two repeat other fields, and every message of a halt is stored with a session. The third is
    # known only at the end.
    for name in ("levels", "invocation", "repeated_failures"):
        del values[name]
    # The deciding limit is repeated at the top, so that log queries need not look into a list.
    return {
        **values,
        "limit": breach.get("limit"),
        "cap": breach.get("cap"),
        "observed": breach.get("observed"),
        "breaches": [dict(each) for each in values["breaches"]],
    }


def marked_stop(stop: Stop, *, synthetic: bool) -> dict[str, Any]:
    """Return what a binding writes into the result of a halt.

    Args:
        stop: The stop.
        synthetic: The text of the result is that of the halt, not written by the model.
    """
    return {**stop_to_json(stop), "synthetic": synthetic}


def _exact(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Convert exact amounts to text, so that they stay exact in JSON."""
    return {name: str(each) if isinstance(each, Decimal) else each for name, each in items}


def stop_from_json(marker: Mapping[str, Any]) -> Stop:
    """Parse the result of `stop_to_json`."""
    # A newer otel-limits may have written the message, with fields unknown to this version.
    known = {spec.name for spec in dataclasses.fields(Stop)}
    values = {name: value for name, value in marker.items() if name in known}
    breaches = tuple(breach_from_json(each) for each in marker.get("breaches", ()))
    values["breaches"] = breaches
    # The breach is always the first of the list, so that they cannot differ.
    values["breach"] = breaches[0] if breaches else None
    values["usage"] = Usage(**marker.get("usage", {}))
    values["cost"] = Decimal(marker.get("cost", 0))
    values["task"] = _task_from_json(marker.get("task", {}))
    return Stop(**values)


def _task_from_json(values: Mapping[str, Any]) -> TaskUsage:
    """Parse the sums of a task; unknown fields are ignored."""
    known = {spec.name for spec in dataclasses.fields(TaskUsage)}  # as above
    named = {name: value for name, value in values.items() if name in known}
    usage, cost = Usage(**named.pop("usage", {})), Decimal(named.pop("cost", 0))
    return TaskUsage(**named, usage=usage, cost=cost)


def breach_from_json(values: Mapping[str, Any]) -> Breach:
    """Parse a breach; unknown fields are ignored."""
    quota = values.get("quota")
    refusal = None if quota is None else QuotaRefusal(**_with_money(quota, *QUOTA_NUMBERS))
    known = {spec.name for spec in dataclasses.fields(Breach)}  # as above
    read = _with_money(values, "cap", "observed", "reserved")
    named = {name: value for name, value in read.items() if name in known}
    return Breach(**{**named, "quota": refusal})


def _with_money(values: Mapping[str, Any], *numbers: str) -> dict[str, Any]:
    """Parse numbers; only amounts of money were written as text."""
    return {
        name: Decimal(each) if name in numbers and isinstance(each, str) else each
        for name, each in values.items()
    }
