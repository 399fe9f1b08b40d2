"""The policy of one agent, and the verdict that halts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from otel_limits.core.labels import best_match, clean
from otel_limits.core.limits import (
    KILLED_STOP_REASON,
    NO_LIMITS,
    STOP_REASONS,
    TREE_PREFIX,
    Breach,
    Limits,
)
from otel_limits.core.origins import origins_of
from otel_limits.core.values import BOOLEAN, FRACTIONS, NAMES, choice

if TYPE_CHECKING:
    from collections.abc import Iterable

    from otel_limits.core.usage import Tally

Action = Literal["observe", "halt", "wrap_up", "raise", "ask"]
ACTIONS: Final[tuple[Action, ...]] = ("observe", "halt", "wrap_up", "raise", "ask")

Reached: TypeAlias = tuple[Breach, Action]
"""A limit that was reached, and the action of its policy."""

Unmeasured = Literal["estimate", "ignore", "halt"]
UNMEASURED: Final[tuple[Unmeasured, ...]] = ("estimate", "ignore", "halt")

Unpriced = Literal["warn", "halt"]
UNPRICED: Final[tuple[Unpriced, ...]] = ("warn", "halt")

ACTION: Final = choice(*ACTIONS)
UNMEASURED_CALLS: Final = choice(*UNMEASURED)
UNPRICED_CALLS: Final = choice(*UNPRICED)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why an agent is halted."""

    reason: str
    breaches: tuple[Breach, ...] = ()
    """Every limit that was reached, the deciding one first; none for a kill."""
    action: Action | None = None
    """The action to take; `None` for that of the agent's policy."""

    @property
    def breach(self) -> Breach | None:
        """The deciding limit."""
        return self.breaches[0] if self.breaches else None


FINAL: Final = ("halt", "raise")
"""Actions that allow no further model call."""

KILLED: Final = Verdict(KILLED_STOP_REASON)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The limits of one agent, and the action at a limit.

    A field with metadata is a setting (see `otel_limits.settings.table`).
    """

    limits: Limits = NO_LIMITS
    tree: Limits = NO_LIMITS
    """Caps for a whole budget tree, set by its root."""
    action: Action = field(
        default="halt",
        metadata={
            "kind": ACTION,
            "help": "Action at a limit: observe (log only), halt, wrap_up (final answer without "
            "tools), raise or ask (interrupt).",
        },
    )
    warn_at: tuple[float, ...] = field(
        default=(),
        metadata={
            "kind": FRACTIONS,
            "help": "Fractions of a limit that log a warning, e.g. 0.5,0.8 (in a file [0.5, 0.8]).",
        },
    )
    budget_hints: bool = field(
        default=False,
        metadata={
            "kind": BOOLEAN,
            "help": "Include remaining budget in each model call (not stored in the conversation).",
        },
    )
    nudge_disabled: bool = field(
        default=False,
        metadata={
            "kind": BOOLEAN,
            "help": "Don't warn the model one repetition before a loop limit.",
        },
    )
    exempt_tools: frozenset[str] = field(
        default=frozenset(),
        metadata={
            "kind": NAMES,
            "help": "Tools excluded from loop limits, e.g. poll_status,wait.",
        },
    )
    """Names or globs."""
    unpriced: Unpriced = field(
        default="warn",
        metadata={
            "kind": UNPRICED_CALLS,
            "help": "Behavior for calls without a price: warn or halt.",
        },
    )
    unmeasured: Unmeasured = field(
        default="estimate",
        metadata={
            "kind": UNMEASURED_CALLS,
            "help": "Behavior for calls without usage: estimate, ignore or halt.",
        },
    )
    watched_tools: frozenset[str] = frozenset()
    """Names or globs of tools that loop limits apply to, although a broader glob exempts them."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where each cap is set, by its name; for a tree as `tree_max_turns`, for a tool as
    `max_calls_per_tool.search`."""

    def merged_over(
        self, limits: Limits, action: Action | None, tree: Limits, origin: str = ""
    ) -> Policy:
        """Return these limits, and `action` if given, merged over this policy."""
        return replace(
            self,
            limits=limits.merged_over(self.limits),
            tree=tree.merged_over(self.tree),
            action=action or self.action,
            origins={
                **self.origins,
                **origins_of(limits, origin),
                **origins_of(tree, origin, TREE_PREFIX),
            },
        )

    def origin_of(self, limit: str, tool: str | None = None) -> str:
        """Return where a cap is set; empty if unknown."""
        return self.origins.get(f"{limit}.{tool}") or self.origins.get(limit, "")

    def exempts(self, tool: str) -> bool:
        """Return whether loop limits ignore `tool`; the most specific glob decides."""
        # Ranked together: `poll_*` may be exempt although `poll_orders` is watched.
        glob = best_match((*self.exempt_tools, *self.watched_tools), tool)
        return glob in self.exempt_tools

    def tree_policy(self) -> Policy:
        """Return the policy of the budget tree, whose limits are the tree caps."""
        return replace(self, limits=self.tree, tree=NO_LIMITS)

    def breaches(
        self, tally: Tally, reserved: Tally | None = None, prefix: str = ""
    ) -> tuple[Breach, ...]:
        """Return every limit that `tally`, plus reservations, has reached.

        With `unmeasured="halt"` a call of unknown size breaches every token limit, with
        `unpriced="halt"` a call of unknown price breaches the cost limit.
        """
        breaches = self.limits.breaches(tally, prefix, reserved)
        # After the caps themselves, so that a cap that was reached is reported with its count.
        if tally.unmeasured_calls and self.unmeasured == "halt":
            why = f"no usage was reported by {clean(tally.unmeasured_model)}"
            breaches += self._unknown(tally, breaches, "token", prefix, why)
        if tally.unpriced_calls and self.unpriced == "halt":
            why = f"no price for {clean(tally.unpriced_model)}"
            breaches += self._unknown(tally, breaches, "USD", prefix, why)
        if not breaches:
            return breaches
        # Only if something was reached: this runs before every model call, and rarely finds
        # anything.
        return tuple(replace(each, origin=self.origin_of(each.limit)) for each in breaches)

    def _unknown(
        self, tally: Tally, known: tuple[Breach, ...], unit: str, prefix: str, why: str
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
                note=f"{why}, so {name}={cap} cannot be kept",
            )
            for kind, cap in self.limits.active
            if unit in kind.unit and (name := prefix + kind.name) not in named
        )


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
