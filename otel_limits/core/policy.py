"""What applies to one agent, and the verdict that stops it."""

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
"""A limit that was reached, and what its owner does about it."""

Unmeasured = Literal["estimate", "ignore", "halt"]
UNMEASURED: Final[tuple[Unmeasured, ...]] = ("estimate", "ignore", "halt")

Unpriced = Literal["warn", "halt"]
UNPRICED: Final[tuple[Unpriced, ...]] = ("warn", "halt")

ACTION: Final = choice(*ACTIONS)
UNMEASURED_CALLS: Final = choice(*UNMEASURED)
UNPRICED_CALLS: Final = choice(*UNPRICED)


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


FINAL: Final = ("halt", "raise")
"""Actions that leave room for no further model call."""

KILLED: Final = Verdict(KILLED_STOP_REASON)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What applies to one agent: its limits, and what is done when one is reached.

    A field with metadata is a setting (see `otel_limits.settings.table`).
    """

    limits: Limits = NO_LIMITS
    tree: Limits = NO_LIMITS
    """Caps for an invocation and everything that it starts, held by the outermost one."""
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
    """Names or globs of tools that loop limits look at where a wider glob exempts them."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where each cap is set, by its name; one of a tree as `tree_max_turns`, one of a tool as
    `max_calls_per_tool.search`."""

    def merged_over(
        self, limits: Limits, action: Action | None, tree: Limits, origin: str = ""
    ) -> Policy:
        """What applies where these are set, over this policy; `action` where it is one."""
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
        """Where a cap is set; empty where that is not known."""
        return self.origins.get(f"{limit}.{tool}") or self.origins.get(limit, "")

    def exempts(self, tool: str) -> bool:
        """Tell whether loop limits don't look at `tool`; the most specific glob decides."""
        # Both kinds are ranked together: `poll_*` may be exempt and `poll_orders` watched all the
        # same.
        glob = best_match((*self.exempt_tools, *self.watched_tools), tool)
        return glob in self.exempt_tools

    def tree_policy(self) -> Policy:
        """What applies to the budget tree of whoever has this policy: its caps are the limits."""
        return replace(self, limits=self.tree, tree=NO_LIMITS)

    def breaches(
        self, tally: Tally, reserved: Tally | None = None, prefix: str = ""
    ) -> tuple[Breach, ...]:
        """Every limit that `tally`, with what is reserved beside it, has reached.

        With `unmeasured="halt"` a call of unknown size breaches every limit on tokens, with
        `unpriced="halt"` a call of unknown price breaches that on cost.
        """
        breaches = self.limits.breaches(tally, prefix, reserved)
        # After the caps themselves: one that what was counted has reached is told with its number.
        if tally.unmeasured_calls and self.unmeasured == "halt":
            why = f"no usage was reported by {clean(tally.unmeasured_model)}"
            breaches += self._unknown(tally, breaches, "token", prefix, why)
        if tally.unpriced_calls and self.unpriced == "halt":
            why = f"no price for {clean(tally.unpriced_model)}"
            breaches += self._unknown(tally, breaches, "USD", prefix, why)
        if not breaches:
            return breaches
        # Only once something was reached: this is asked before every model call, and rarely
        # answers.
        return tuple(replace(each, origin=self.origin_of(each.limit)) for each in breaches)

    def _unknown(
        self, tally: Tally, known: tuple[Breach, ...], unit: str, prefix: str, why: str
    ) -> tuple[Breach, ...]:
        """Every other limit in this unit: what was counted is below it, and is not all."""
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
    """Decide on one stop reason and one action; `None` when nothing was reached.

    What is only observed stands behind what acts. A last answer, or a human's extension, is of
    use only where no other limit ends the invocation all the same.
    """
    # By the order of STOP_REASONS, so that the same state ends with the same reason everywhere.
    ordered = sorted(
        reached, key=lambda each: (each[1] == "observe", STOP_REASONS.index(each[0].reason))
    )
    if not ordered:
        return None
    actions = [action for _, action in ordered]
    action = next((each for each in actions if each in FINAL), actions[0])
    breaches = tuple(breach for breach, _ in ordered)
    return Verdict(breaches[0].reason, breaches, action)
