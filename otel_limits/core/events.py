"""What happened: one event per event, handed to every observer; none can change it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from otel_limits.core.usage import NO_COST, NO_USAGE, Number, Usage
from otel_limits.core.values import FrozenDict

if TYPE_CHECKING:
    from otel_limits.core.limits import Breach, Level, Limits
    from otel_limits.core.quota_state import QuotaRefusal

ActionTaken = Literal["none", "observed", "halted", "wrapped_up", "raised"]
"""What otel-limits did at the end of an invocation."""

HALTED: Final = ("halted", "raised", "wrapped_up")
"""Actions by which a limit ended an invocation."""
SYNTHETIC: Final = ("halted", "raised")
"""Those that leave a message which no model wrote; `wrapped_up` leaves the model's last answer."""

CallKind = Literal["measured", "zero_token", "unmeasured", "failed"]
"""How much is known of a model call. A halt has no kind: no model was called."""

ToolStatus = Literal["success", "error", "refused"]
"""How a tool call ended."""

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
"""What a quota said to a model call. `waited` was admitted after a wait for it, and `gave_up` was
refused after one; `observed` would have been refused; `unpriced` is a call that a quota in money
does not count; the degraded ones were made without the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """Which invocation an event belongs to."""

    agent: str
    id: str
    """Unique over processes and restarts."""
    root_id: str
    """The outermost invocation of its budget tree; its own id when it is that one."""
    parent_id: str | None = None
    """The invocation that started it, if one did."""
    trace_id: str | None = None
    """32 hexadecimal digits, or `None` when the invocation has no recorded span."""
    span_id: str | None = None
    """16 hexadecimal digits of the `invoke_agent` span."""
    sampled: bool = False
    """True when that span is going to be exported, so that a link to its trace leads somewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """An invocation began."""

    invocation: Invocation
    limits: Limits
    action: ActionTaken
    """What will be done when a limit is reached."""
    unsampled: bool
    """True when its span did not reach the span processor, so that hooks are followed."""
    model: str | None = None
    """Id of the agent's model, where it has one."""
    session_id: str | None = None
    """The agent's session, where the framework has one."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    """What the keys chosen for audit were set to, in the baggage or on the agent."""
    at: float = field(default_factory=time.time)
    """Wall clock time, in seconds since the epoch."""
    tree: Mapping[str, Number] = field(default_factory=dict)
    """The caps of the budget trees that it belongs to, such as `tree_max_turns`, the tightest
    where several trees have one."""
    has_quotas: bool = False
    """True while there are quotas that its model calls may have to ask."""
    configured_action: str = "halt"
    """What is done when a limit is reached, as it is configured, such as `ask`."""

    def __post_init__(self) -> None:
        """Keep both dictionaries as they are now, whatever becomes of those given."""
        object.__setattr__(self, "attributes", FrozenDict(self.attributes))
        object.__setattr__(self, "tree", FrozenDict(self.tree))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """An event loop cycle began, replays of interrupted tools included."""

    invocation: Invocation


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A model response was taken into the conversation."""

    invocation: Invocation
    number: int
    """1 for the first turn of the invocation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One request to a provider, settled."""

    invocation: Invocation
    number: int
    """1 for the first model call of the invocation."""
    model: str
    """Model id as the provider knows it, or `unknown`."""
    kind: CallKind
    usage: Usage
    """Tokens as they count against the budget."""
    estimated: bool
    """True when `usage` is an estimate because the provider reported none."""
    span_id: str | None
    """16 hexadecimal digits of the `chat` span, where there is one."""
    seconds: float | None
    """Duration of the call, where it is known."""
    price: Decimal | None = None
    """USD, or `None` when the price is unknown: never a guess, never 0 for unknown."""
    price_source: str | None = None
    """Where the price comes from, such as `genai-prices` or `policy`."""
    price_version: str | None = None
    """Version of that source, so that a price can be checked later."""
    price_basis: str | None = None
    """What the price depends on beside tokens and tier, as JSON; `None` for nothing."""
    unpriced: str | None = None
    """Why the price is unknown, in words."""
    cache_saved: Decimal | None = None
    """USD that it would have cost more without a cache, below 0 where writing to one cost more than
    reading saved; `None` where it used none, or nobody knows."""
    cost_is_limited: bool = False
    """True when there is a limit on cost that an unknown price passes by."""
    tier: str | None = None
    """The service tier that it was billed at, such as `standard`, where it is known."""
    provider: str = "unknown"
    """Who serves the model, such as `bedrock`."""
    reported: Usage | None = None
    """Tokens exactly as the provider reported them; `None` when it reported none."""
    reported_total: int | None = None
    """The provider's own total, which may or may not contain cached tokens."""
    turn: int = 0
    """Number of the turn that it worked for; retries of a response share it."""
    iteration: int = 0
    """The same, counted per leg."""
    quota_operation: str | None = None
    """Id under which shared quotas count it; `None` where none applies."""
    quota_charges: str | None = None
    """What they count, for whoever settles in the place of a killed worker."""
    after_tools: Mapping[str, int] = field(default_factory=dict)
    """The tools whose results are new in its request, and how often each was called in the turn
    before; none where the agent's loop did not make it."""
    side: bool = False
    """True when the agent's loop did not make it: a summary, a direct structured output, a model
    that a tool asks, memory extraction, a background task. It may come after the `Stop`."""
    at: float = field(default_factory=time.time)
    """Wall clock time at which its end was seen, in seconds since the epoch."""

    def __post_init__(self) -> None:
        """Keep the tools as they are now, whatever becomes of those given."""
        object.__setattr__(self, "after_tools", FrozenDict(self.after_tools))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool that the model asked for, in its final attempt."""

    invocation: Invocation
    number: int
    """1 for the first tool call of the invocation, in the order of the requests."""
    tool: str
    status: ToolStatus
    """`refused` when a limit kept it from running; `error` also when a hook denied it, or when no
    tool can have its name."""
    seconds: float | None
    """Duration of that attempt; `None` when no tool ran, or when it goes on in the background."""
    fingerprint: str | None
    """Hash of name, arguments and result: equal for equal calls; nothing can be read from it."""
    turn: int = 0
    """Number of the turn that asked for it."""
    at: float = field(default_factory=time.time)
    """Wall clock time at which its end was seen, in seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitWarning:
    """A soft threshold of a limit was passed: once per invocation, limit and threshold."""

    invocation: Invocation
    threshold: float
    """Fraction of the cap, such as 0.8."""
    level: Level


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """A limit was reached: the agent was stopped, or would have been (`observed`)."""

    invocation: Invocation
    reason: str
    """The stop reason that it leads to."""
    breaches: tuple[Breach, ...]
    """Every limit that was reached, the one that decides first; none when it was killed."""
    action: ActionTaken
    sentence: str = field(default="", compare=False)
    """All of it for a reader: what was stopped, by which limit, how much of how much, where that is
    set, and what to do next."""

    @property
    def breach(self) -> Breach | None:
        """The limit that decides."""
        return self.breaches[0] if self.breaches else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """How an invocation ended, told once per finished invocation."""

    reason: str
    """The stop reason of its result, `error` after an exception, `aborted` when nobody waited for
    a result, `evicted` when it was dropped from the bounded registry of live invocations."""
    action: ActionTaken
    breach: Breach | None
    """The limit that decided, when one did."""
    breaches: tuple[Breach, ...] = ()
    """Every limit that had been reached when the first one decided."""
    turns: int = 0
    usage: Usage = NO_USAGE
    agent: str = ""
    trace_id: str | None = None
    invocation_id: str = ""
    cycles: int = 0
    model_calls: int = 0
    started: float = 0.0
    """Wall clock time at which the invocation began, in seconds since the epoch."""
    seconds: float = 0.0
    """Duration of the invocation."""
    tool_calls: int = 0
    cost: Decimal = NO_COST
    """USD of the model calls with a known price."""
    unpriced_calls: int = 0
    """Model calls with tokens but without a known price."""
    invocation: Invocation | None = field(default=None, compare=False)
    """Its place in the budget tree; not kept in the conversation."""
    levels: tuple[Level, ...] = field(default=(), compare=False)
    """How much of each limit that is set had been used."""

    @property
    def quota(self) -> QuotaRefusal | None:
        """How the quota stood that ended the invocation, when one did."""
        return self.breach.quota if self.breach is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaDecision:
    """A quota was asked whether a model call may go out."""

    invocation: Invocation
    quota: str
    key: str
    """Whose share of the quota; what came from outside appears as a hash."""
    decision: Decision
    wanted: Number
    """What the call may take at most."""
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaUse:
    """How one key of a quota stands in the present window, over all processes."""

    quota: str
    key: str
    unit: str
    used: Number
    reserved: Number
    """Set aside for calls that are under way."""
    limit: Number
    """What is permitted, grants included."""
    resets: float
    """When the window ends, in seconds since the epoch; without one, a day ahead at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaWait:
    """A model call begins to wait for a quota, or its wait is over, however it ended."""

    invocation: Invocation
    quota: str
    key: str
    """Whose share of the quota; what came from outside appears as a hash."""
    seconds: float | None
    """How long it waited; `None` when it begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaGrant:
    """A person changed what a quota permits to one key, or set its use back to 0."""

    quota: str
    key: str
    change: Literal["grant", "revoke", "reset", "block", "unblock"]
    amount: Number
    """What was granted; 0 for every other change."""
    unit: str
    until: float | None
    """Seconds since the epoch at which the grant or the block ends."""
    by: str
    """User and host that did it."""
    at: float
    """Seconds since the epoch at which it was done."""
    id: str
    """Unique over all changes."""
    reason: str = ""
    """Why, in the words of whoever blocked a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InternalError:
    """Something inside otel-limits failed and was kept away from the agent."""

    component: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverDropped:
    """An observer lost events: it failed on them, or could not keep up."""

    observer: str
    events: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverLag:
    """How long an observer kept the end of an invocation waiting."""

    observer: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRead:
    """A new version of the policy file was read."""

    path: str
    valid: bool
    """False when it was refused, so that the version before it stays in force."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Enforcing:
    """It is known whether limits are in force in this process."""

    source: str
    """By which way otel-limits was switched on first: `run`, `autoload`, `instrumentor`,
    `provider`, `code` or `plugin`."""
    in_force: bool
    """False when it is switched on and cannot stop any agent."""


Event: TypeAlias = (
    Started
    | Cycle
    | Turn
    | ModelCall
    | ToolCall
    | LimitWarning
    | Halt
    | Stop
    | QuotaDecision
    | QuotaUse
    | QuotaWait
    | QuotaGrant
    | InternalError
    | ObserverDropped
    | ObserverLag
    | PolicyRead
    | Enforcing
)

Observer: TypeAlias = Callable[[Event], None]
"""Anything that is told every event. It may fail: that is logged, counted and never felt.

It may have two attributes. `component` is what its failures are counted under. `subscribes_to` is
a tuple of types of events: it is told those, and every `Stop`. Where that is a dictionary, its
values are what takes the events of each type.
"""
