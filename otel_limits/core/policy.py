"""What applies to one agent, and the verdict that stops it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from otel_limits.core.globs import best_match
from otel_limits.core.limits import KILLED_STOP_REASON, NO_LIMITS, STOP_REASONS, Breach, Limits
from otel_limits.core.values import choice

if TYPE_CHECKING:
    from otel_limits.core.usage import Tally

Action = Literal["observe", "halt", "wrap_up", "raise", "ask"]
ACTIONS: Final[tuple[Action, ...]] = ("observe", "halt", "wrap_up", "raise", "ask")

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


KILLED: Final = Verdict(KILLED_STOP_REASON)


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

    def under(self, limits: Limits, action: Action | None, tree: Limits) -> Policy:
        """What applies where these are set, over this policy; `action` where it is one."""
        return replace(
            self,
            limits=limits.over(self.limits),
            tree=tree.over(self.tree),
            action=action or self.action,
        )

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
