"""What an invocation and the trees around it may use, have used, and have reserved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from otel_limits.core.limits import TREE_PREFIX
from otel_limits.core.usage import EXACT, NO_COST, Tally

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from decimal import Decimal

    from otel_limits.core.limits import Level
    from otel_limits.core.policy import Policy, Reached

ASSUMED_OUTPUT: Final = 1024
"""Output tokens that a model is assumed to answer with before it has answered once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What a model call under way may still use."""

    turns: int = 0
    model_calls: int = 0
    input: int = 0
    output: int = 0
    cost: Decimal = NO_COST
    """USD of these tokens, where a budget in money has to know and the price is known."""


class Budget:
    """What one invocation, or one budget tree, may use. All of it is guarded by the runs' lock."""

    __slots__ = (
        "members",
        "outputs",
        "policy",
        "prefix",
        "reserved",
        "started",
        "tally",
        "wrapped_up",
    )

    def __init__(self, policy: Policy, started: float, prefix: str = "") -> None:
        """Begin with nothing used; the policy's limits are the caps, its owner's action acts."""
        self.policy = policy
        self.started = started
        self.prefix = prefix
        self.tally = Tally()
        self.reserved = Tally()
        self.wrapped_up = False
        """True when a model was asked for the one last answer that may pass a cap."""
        self.members = 0
        """How many are under way in it: after the last, calls are counted, and not refused."""
        self.outputs: dict[str, int] = {}
        """Most output tokens of one answer, by model."""

    def reserve(self, reservation: Reservation) -> None:
        """Keep this for a model call."""
        held = self.reserved
        held.turns += reservation.turns
        held.model_calls += reservation.model_calls
        held.input += reservation.input
        held.output += reservation.output
        held.cost = EXACT.add(held.cost, reservation.cost)

    def release(self, reservation: Reservation) -> None:
        """Keep it no longer."""
        held = self.reserved
        held.turns -= reservation.turns
        held.model_calls -= reservation.model_calls
        held.input -= reservation.input
        held.output -= reservation.output
        held.cost = EXACT.subtract(held.cost, reservation.cost)

    def reached(
        self, *, with_reserved: bool, forces_output: bool = False, side: bool = False
    ) -> Iterator[Reached]:
        """Every cap that is reached, and what its owner does about that.

        Args:
            with_reserved: Count what calls under way have reserved as if it were used.
            forces_output: Leave out limits that yield to a call that only forces the output.
            side: Leave out limits that a call beside the agent's loop cannot pass.
        """
        # The last who was under way in it has ended: nobody is left whom a refusal could stop.
        if side and not self.members:
            return
        reserved = self.reserved if with_reserved else None
        for breach in self.policy.breaches(self.tally, reserved, self.prefix):
            if forces_output and breach.yields_to_output:
                continue
            if side and not breach.binds_side_calls:
                continue
            yield breach, self.policy.action

    def covers(self, policy: Policy) -> bool:
        """Tell whether a tree within this one, by `policy`, could never be spent before it."""
        caps = dict(self.policy.limits.items())
        # With another action it would do something else at the same cap, and has to be asked.
        return self.policy.action == policy.action and all(
            name in caps and caps[name] <= cap for name, cap in policy.tree.items()
        )


class Budgets:
    """Every budget that binds one invocation: its own, then its trees from the innermost on."""

    __slots__ = ("all", "has_cost_limit", "own", "passes_unpriced")

    def __init__(self, own: Budget, trees: tuple[Budget, ...]) -> None:
        """Put them together; they are shared with everything else that stands in these trees."""
        self.own = own
        self.all = (own, *trees)
        capped = [each.policy for each in self.all if each.policy.limits.max_cost_usd]
        self.has_cost_limit = bool(capped)
        self.passes_unpriced = any(policy.unpriced == "warn" for policy in capped)
        """True when a limit on cost does not hold for a call whose price is unknown."""

    def __iter__(self) -> Iterator[Budget]:
        """Each of them."""
        return iter(self.all)

    @property
    def outputs(self) -> dict[str, int]:
        """Most output tokens of one answer by model, as far as the outermost tree has seen."""
        # It has seen every answer that the trees within it have, and those of their siblings.
        return self.all[-1].outputs

    def reserve(self, reservation: Reservation) -> Reservation:
        """Keep this in each of them."""
        for budget in self.all:
            budget.reserve(reservation)
        return reservation

    def release(self, reservation: Reservation) -> None:
        """Keep it no longer in any."""
        for budget in self.all:
            budget.release(reservation)

    def measure_time(self, now: float) -> None:
        """Note how late it is, before anybody decides."""
        for budget in self.all:
            budget.tally.seconds = now - budget.started

    def levels(self) -> tuple[Level, ...]:
        """How much of each limit has been used; of a tree's, in the tree that has the least."""
        levels: dict[str, Level] = {}
        for budget in self.all:
            for level in budget.policy.limits.levels(budget.tally, budget.prefix):
                other = levels.get(level.limit)
                if other is None or other.ratio < level.ratio:
                    levels[level.limit] = level
        return tuple(levels.values())

    def claim_wrap_up(self, refusing: Collection[Budget]) -> bool:
        """Take the one last answer of every budget that is spent; False where one has none.

        A tree has one for all who are in it, and none for whoever has done nothing in it yet.

        Args:
            refusing: Budgets that have refused a tool call, which spends them as well.
        """
        if self.own.wrapped_up:
            return False
        spent = []
        for budget in self.all:
            breaches = [breach for breach, _ in budget.reached(with_reserved=True)]
            # What is not spent, or never stops anybody, has nothing to say about the last answer.
            if budget.policy.action == "observe" or not (breaches or budget in refusing):
                continue
            if budget.policy.action != "wrap_up" or budget.wrapped_up:
                return False
            # A limit on model calls, for instance, would be passed by the last answer itself.
            if not all(breach.leaves_room for breach in breaches):
                return False
            if budget is not self.own and not self.own.tally.turns:
                return False
            spent.append(budget)
        # Only now: what one of them refuses must not have cost another its last answer.
        for budget in (self.own, *spent):
            budget.wrapped_up = True
        return True


def new_tree(policy: Policy, started: float) -> Budget:
    """Begin the budget tree of whoever has this policy."""
    return Budget(policy.tree_policy(), started, TREE_PREFIX)
