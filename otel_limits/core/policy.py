"""The policy of one agent, its message for end users, and the verdict that halts it."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from otel_limits.core.comparisons import (
    changed,
    loosest,
    shorter,
)
from otel_limits.core.failures import TOOL_FAILURES, FailureRule, is_failure
from otel_limits.core.labels import best_match, clean
from otel_limits.core.limits import (
    CONVERSATION,
    CONVERSATION_PREFIX,
    KILLED_STOP_REASON,
    NO_LIMITS,
    STOP_REASONS,
    TREE,
    TREE_PREFIX,
    Breach,
    Limits,
    caps_by_name,
    extended_origin,
    origins_of,
    require_limits,
    require_shared,
)
from otel_limits.core.secrets import redact_value
from otel_limits.core.values import (
    BOOLEAN,
    FRACTIONS,
    KEY_SOURCES,
    NAMES,
    TIME_SPAN,
    CheckedKind,
    FrozenDict,
    InvalidValueError,
    choice,
    setting,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from otel_limits.core.usage import Tally


# --- the message for end users --------------------------------------------------------------------

HALT_MESSAGE_DEFAULT: Final = "This request could not be completed because {reason}."

HALT_MESSAGE_FIELDS: Final = ("agent", "reason", "limit", "used")


def _halt_message(text: object) -> str:
    if not isinstance(text, str):
        raise InvalidValueError
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError:
        raise InvalidValueError("Write a single brace as {{ or }}.") from None
    known = ", ".join(f"{{{name}}}" for name in HALT_MESSAGE_FIELDS)
    for _, name, form, conversion in parts:
        # Not even an attribute of a known field: its value would be code of the process.
        if name is not None and (name not in HALT_MESSAGE_FIELDS or form or conversion):
            raise InvalidValueError(f"{{{redact_value(name)}}} is unknown. The fields are {known}.")
    # The other fields can be empty, and providers refuse messages without text.
    if not text.format(agent="", reason="it", limit="", used="").strip():
        raise InvalidValueError(f"It needs words besides {known}.")
    return text


HALT_MESSAGE: Final = CheckedKind[str](
    phrase="a message with text, and any of the fields {agent}, {reason}, {limit} and {used}",
    check=_halt_message,
    parse=str,
    schema={"type": "string", "minLength": 1},
)


# --- policy and verdict ---------------------------------------------------------------------------

Action = Literal["observe", "halt", "wrap_up", "raise", "ask"]
ACTIONS: Final[tuple[Action, ...]] = ("observe", "halt", "wrap_up", "raise", "ask")

Reached: TypeAlias = tuple[Breach, Action]
"""A limit that was reached, and the action of its policy."""

HaltedNode = Literal["complete", "fail"]
HALTED_NODES: Final[tuple[HaltedNode, ...]] = ("complete", "fail")

OnResume = Literal["continue", "fresh"]
OnUnreadConversation = Literal["deny", "allow"]
ON_RESUME: Final[tuple[OnResume, ...]] = ("continue", "fresh")

ToolAction = Literal["refuse", "halt"]
TOOL_ACTIONS: Final[tuple[ToolAction, ...]] = ("refuse", "halt")

Unmeasured = Literal["estimate", "ignore", "halt"]
UNMEASURED: Final[tuple[Unmeasured, ...]] = ("estimate", "ignore", "halt")

Unpriced = Literal["warn", "halt"]
UNPRICED: Final[tuple[Unpriced, ...]] = ("warn", "halt")

ACTION: Final = choice(*ACTIONS)
HALTED_NODE: Final = choice(*HALTED_NODES)
RESUMED: Final = choice(*ON_RESUME)
UNREAD_CONVERSATION: Final = choice("deny", "allow")
TOOL_ACTION: Final = choice(*TOOL_ACTIONS)
UNMEASURED_CALLS: Final = choice(*UNMEASURED)
UNPRICED_CALLS: Final = choice(*UNPRICED)

HALTS_LESS: Final = loosest("refuse")
"""Compares actions at a cap of a tool."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why an agent is halted."""

    reason: str
    breaches: tuple[Breach, ...] = ()
    """Every limit that was reached, the deciding one first; none for a kill."""
    action: Action | None = None
    """The action to take; `None` for that of the agent's policy."""
    remark: str = ""
    """A sentence for the operator about a final answer or a question, if something went wrong."""
    asks_again: bool = False
    """True if a person is asked once again, as the answer was not understood."""

    @property
    def breach(self) -> Breach | None:
        """The deciding limit."""
        return self.breaches[0] if self.breaches else None


FINAL: Final = ("halt", "raise")
"""Actions that allow no further model call."""

COST: Final = "max_cost_usd"

ENDING_QUOTAS: Final = ("tokens", "model_calls")
"""Units of quotas besides USD that end a runaway agent; the others only limit new or concurrent
work."""

KILLED: Final = Verdict(KILLED_STOP_REASON)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Values that code sets for an agent; those that are `None` are inherited.

    Raises:
        ValueError: A value is invalid, or a limit makes no sense for a tree or a conversation.
    """

    limits: Limits = NO_LIMITS
    tree: Limits = NO_LIMITS
    conversation: Limits = NO_LIMITS
    action: Action | None = None
    halt_message: str | None = None
    origin: str = ""
    """Where that is, for the operator."""

    def __post_init__(self) -> None:
        """Reject invalid values."""
        require_limits("limits", self.limits)
        require_shared(TREE, self.tree)
        require_shared(CONVERSATION, self.conversation)
        if self.action is not None:
            ACTION.of_value("action", self.action)
        if self.halt_message is not None:
            HALT_MESSAGE.of_value("halt_message", self.halt_message)

    def extended_by(self, other: Overrides) -> Overrides:
        """Return these caps, with those of `other` over them."""
        return replace(
            self,
            limits=other.limits.merged_over(self.limits),
            conversation=other.conversation.merged_over(self.conversation),
        )


NO_OVERRIDES: Final = Overrides()


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The limits of one agent, and the action at a limit.

    A field made by `setting` is a setting (see `otel_limits.settings.table`).
    """

    limits: Limits = NO_LIMITS
    tree: Limits = NO_LIMITS
    """Caps for a whole budget tree, set by its root."""
    conversation: Limits = NO_LIMITS
    """Caps for all invocations of a conversation, set by the agent that begins them."""
    action: Action = setting(
        "halt",
        ACTION,
        "Action at a limit: observe (log only), halt, wrap_up (final answer without "
        "tools), raise or ask (interrupt).",
        is_looser=loosest("observe"),
    )
    halt_message: str = setting(
        HALT_MESSAGE_DEFAULT,
        HALT_MESSAGE,
        "Text of a halt for the end user, with {agent}, {reason}, {limit} and {used}.",
    )
    halted_node: HaltedNode = setting(
        "complete", HALTED_NODE, "Status of a halted node of a graph or swarm: complete or fail."
    )
    tool_action: ToolAction = setting(
        "refuse",
        TOOL_ACTION,
        "Action at a cap of max_calls_per_tool: refuse (only that tool) or halt.",
        is_looser=HALTS_LESS,
    )
    on_resume: OnResume = setting(
        "continue",
        RESUMED,
        "Budget after an interrupt is answered: continue (that of the task) or fresh.",
        is_looser=loosest("fresh"),
    )
    conversation_key: str | None = setting(
        None,
        KEY_SOURCES,
        "ID of a conversation: attribute.NAME or baggage.NAME. Unset: its thread or session.",
        is_looser=changed,
    )
    conversation_idle: timedelta = setting(
        timedelta(days=1),
        TIME_SPAN,
        "Idle time after which a conversation is forgotten, e.g. 12h.",
        is_looser=shorter,
    )
    conversation_on_store_error: OnUnreadConversation = setting(
        "deny",
        UNREAD_CONVERSATION,
        "Invocations that begin in a conversation while the quota store is unavailable: deny or "
        "allow (count in this process).",
        is_looser=loosest("allow"),
    )
    tool_failures: FailureRule = setting(
        "text",
        TOOL_FAILURES,
        "Results that are failures: text (also texts that begin like an error), marked (only those "
        "that the framework marks), or patterns, e.g. ^no route,timeout.",
        is_looser=changed,
    )
    warn_at: tuple[float, ...] = setting(
        (),
        FRACTIONS,
        "Fractions of a limit that log a warning, e.g. 0.5,0.8 (in a file [0.5, 0.8]).",
    )
    budget_hints: bool = setting(
        False,
        BOOLEAN,
        "Include remaining budget in each model call (not stored in the conversation).",
    )
    nudge_disabled: bool = setting(
        False, BOOLEAN, "Don't warn the model one repetition before a loop limit."
    )
    exempt_tools: frozenset[str] = setting(
        frozenset(), NAMES, "Tools excluded from loop limits, e.g. poll_status,wait."
    )
    """Names or globs."""
    unpriced: Unpriced | None = setting(
        None,
        UNPRICED_CALLS,
        "Behavior for calls without a price: warn or halt. Unset: halt if only limits "
        "in USD apply to the agent, else warn.",
        is_looser=loosest("warn", None),
    )
    """`None` for `unpriced_by_default`."""
    unmeasured: Unmeasured = setting(
        "estimate",
        UNMEASURED_CALLS,
        "Behavior for calls without usage: estimate, ignore or halt.",
        is_looser=loosest("ignore", "estimate"),
    )
    quotas: frozenset[tuple[str, Action | None]] = frozenset()
    """Unit of each quota that covers all calls of the agent, with its own action, if any."""
    actions_by_tool: Mapping[str, ToolAction] = field(default_factory=FrozenDict)
    """`tool_action` by the name or glob of a tool."""
    failures_by_tool: Mapping[str, FailureRule] = field(default_factory=FrozenDict)
    """`tool_failures` by the name or glob of a tool."""
    watched_tools: frozenset[str] = frozenset()
    """Names or globs of tools that loop limits apply to, although a broader glob exempts them."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where each cap is set, by its name; for a tree as `tree_max_turns`, for a tool as
    `max_calls_per_tool.search`."""

    def overridden_by(self, own: Overrides) -> Policy:
        """Return this policy with everything that code sets."""
        return replace(
            self,
            limits=own.limits.merged_over(self.limits),
            tree=own.tree.merged_over(self.tree),
            conversation=own.conversation.merged_over(self.conversation),
            action=own.action or self.action,
            halt_message=own.halt_message or self.halt_message,
            origins={
                **self.origins,
                **origins_of(own.limits, own.origin),
                **origins_of(own.tree, own.origin, TREE_PREFIX),
                **origins_of(own.conversation, own.origin, CONVERSATION_PREFIX),
            },
        )

    def extended_to(self, caps: Limits, prefix: str = "") -> Policy:
        """Return this policy with caps to which an answer has extended limits.

        Args:
            caps: The caps.
            prefix: That of the limits, if they are those of a conversation.
        """
        now, sources = caps_by_name(self.limits), self.sources(prefix)
        origins = {
            prefix + name: extended_origin(now.get(name), sources.get(prefix + name, ""))
            for name in caps_by_name(caps)
        }
        return replace(
            self, limits=caps.merged_over(self.limits), origins={**self.origins, **origins}
        )

    def origin_of(self, limit: str, tool: str | None = None) -> str:
        """Return where a cap is set; empty if unknown."""
        return self.origins.get(f"{limit}.{tool}") or self.origins.get(limit, "")

    def sources(self, prefix: str = "") -> dict[str, str]:
        """Return where each of its caps is set, by its name with a prefix."""
        return {
            prefix + (f"{name}.{tool}" if tool else name): self.origin_of(prefix + name, tool)
            for name, cap in self.limits.items()
            for tool in (cap if isinstance(cap, Mapping) else (None,))
        }

    def exempts(self, tool: str) -> bool:
        """Return whether loop limits ignore `tool`; the most specific glob decides."""
        # Ranked together: `poll_*` may be exempt although `poll_orders` is watched.
        glob = best_match((*self.exempt_tools, *self.watched_tools), tool)
        return glob in self.exempt_tools

    @property
    def named_tools(self) -> frozenset[str]:
        """The names and globs of tools that it has a rule for."""
        caps = (cap for _, cap in self.limits.items() if isinstance(cap, Mapping))
        exempt = self.exempt_tools | self.watched_tools
        return exempt.union(*caps, self.actions_by_tool, self.failures_by_tool)

    def refuses_only(self, tool: str) -> bool:
        """Return whether a cap of `tool` refuses its calls and does not halt the agent."""
        return self._action_of(tool) == "refuse"

    def is_failure(self, tool: str, status: str, text: str) -> bool | None:
        """Return whether a call of `tool` has failed, by its status, or by its text.

        `None` for a call that was refused, which is neither a failure nor a success.
        """
        if status == "refused":
            return None
        return status == "error" or is_failure(text, self._failures_of(tool))

    def _action_of(self, tool: str) -> ToolAction:
        glob = best_match(self.actions_by_tool, tool)
        return self.tool_action if glob is None else self.actions_by_tool[glob]

    def _failures_of(self, tool: str) -> FailureRule:
        glob = best_match(self.failures_by_tool, tool)
        return self.tool_failures if glob is None else self.failures_by_tool[glob]

    @property
    def is_capped(self) -> bool:
        """True if it has a cap, of the agent, of its budget tree or of its conversations."""
        caps = (self.limits, self.tree, self.conversation)
        return any(cap for each in caps for _, cap in each.items())

    @property
    def halts_unpriced(self) -> bool:
        """True if a call without a price halts the agent, outside of other agents' trees."""
        shared = [self.tree_policy(), self.conversation_policy()]
        capped = any(each.limits.max_cost_usd for each in (self, *shared))
        has_usd_limit = capped or any(unit == "usd" for unit, _ in self.quotas)
        rule = self.unpriced or unpriced_by_default(self, shared)
        return bool(has_usd_limit) and rule == "halt"

    def tree_policy(self) -> Policy:
        """Return the policy of the budget tree, whose limits are the tree caps."""
        return replace(self, limits=self.tree, tree=NO_LIMITS)

    def conversation_policy(self) -> Policy:
        """Return the policy of a conversation, whose limits are the caps of conversations."""
        return replace(self, limits=self.conversation, tree=NO_LIMITS)

    def breaches(
        self,
        tally: Tally,
        reserved: Tally | None = None,
        prefix: str = "",
        unpriced_default: Unpriced = "warn",
    ) -> tuple[Breach, ...]:
        """Return every limit that `tally`, plus reservations, has reached.

        With `unmeasured="halt"` a call of unknown size breaches every token limit, with
        `unpriced="halt"` a call of unknown price breaches the cost limit.

        Args:
            tally: The usage so far.
            reserved: Reservations of in-flight calls.
            prefix: Prefix of the names of limits.
            unpriced_default: The behavior for calls without a price if this policy sets none.
        """
        breaches = self.limits.breaches(tally, prefix, reserved)
        # After the caps themselves, so that a cap that was reached is reported with its count.
        if tally.unmeasured_calls and self.unmeasured == "halt":
            why = f"model {clean(tally.unmeasured_model)!r} reported no usage"
            breaches += self._unknown(tally, breaches, "token", prefix, why)
        if tally.unbounded_calls and (self.unpriced or unpriced_default) == "halt":
            why = f"no price for model {clean(tally.unbounded_model)!r}{tally.unbounded_because}"
            and_so = "" if self.unpriced else ", and no other limit applies"
            breaches += self._unknown(tally, breaches, "USD", prefix, why, and_so)
        if not breaches:
            return breaches
        # Only if something was reached: this runs before every model call, and rarely finds
        # anything.
        return tuple(
            replace(each, origin=self.origin_of(each.limit, each.subject)) for each in breaches
        )

    def _unknown(
        self,
        tally: Tally,
        known: tuple[Breach, ...],
        unit: str,
        prefix: str,
        why: str,
        and_so: str = "",
    ) -> tuple[Breach, ...]:
        """Return the other limits in this unit, whose count is incomplete."""
        named = {breach.limit for breach in known}
        return tuple(
            Breach(
                name,
                cap,
                kind.observed(tally),
                kind.reason,
                kind.unit,
                uncounted=True,
                note=f"{why}, so {name}={cap} cannot be enforced{and_so}",
            )
            for kind, cap in self.limits.active
            if unit in kind.unit and (name := prefix + kind.name) not in named
        )


COMPARED: Final = {
    each.name: each.metadata["is_looser"]
    for each in fields(Policy)
    if each.metadata.get("is_looser")
}
"""Settings that can make a policy looser, with the comparison of each."""


def unpriced_by_default(own: Policy, trees: Iterable[Policy]) -> Unpriced:
    """Return the behavior for calls without a price if the policy of an agent does not set it.

    It halts the agent if nothing but limits in USD could: such calls would never reach those.

    Args:
        own: The policy of the agent.
        trees: The policies of the budget trees that it is in.
    """
    others = any(
        cap and name != COST
        for policy in (own, *trees)
        if policy.action != "observe"
        for name, cap in policy.limits.items()
    ) or any(
        unit in ENDING_QUOTAS and (action or own.action) != "observe" for unit, action in own.quotas
    )
    return "warn" if others else "halt"


def verdict_of(reached: Iterable[Reached]) -> Verdict | None:
    """Return one stop reason and one action; `None` if nothing was reached.

    Would-be halts come last. A final answer or an extension helps only if no other limit ends the
    invocation anyway.
    """
    # In the order of STOP_REASONS, so that the same state always ends with the same reason.
    ordered = sorted(
        reached, key=lambda each: (each[1] == "observe", STOP_REASONS.index(each[0].reason))
    )
    if not ordered:
        return None
    actions = [action for _, action in ordered]
    action = next((each for each in actions if each in FINAL), actions[0])
    breaches = tuple(breach for breach, _ in ordered)
    return Verdict(breaches[0].reason, breaches, action)
