"""The limits, usage and reservations of an invocation and of the enclosing budget trees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from otel_limits.core.limits import CONVERSATION_PREFIX, LIMITS, TREE_PREFIX, Breach, Level
from otel_limits.core.policy import COMPARED, unpriced_by_default
from otel_limits.core.usage import EXACT, NO_COST, Tally

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from decimal import Decimal

    from otel_limits.core.limits import Limits
    from otel_limits.core.policy import Policy, Reached, Unpriced

Counted = TypeVar("Counted", Breach, Level)

RULES: Final = {
    TREE_PREFIX: ("unmeasured", "unpriced"),
    CONVERSATION_PREFIX: (
        "unmeasured",
        "unpriced",
        "conversation_idle",
        "conversation_on_store_error",
    ),
}
"""Settings besides the action that a shared budget applies, by its prefix."""

ASSUMED_OUTPUT: Final = 1024
"""Assumed output tokens of a model that has not answered yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """The possible usage of an in-flight model call."""

    turns: int = 0
    iterations: int = 0
    model_calls: int = 0
    input: int = 0
    output: int = 0
    cost: Decimal = NO_COST
    """USD for these tokens, if there is a cost limit and the price or its bound is known."""


class Budget:
    """The budget of one invocation or one budget tree, guarded by the registry's lock."""

    __slots__ = (
        "leader",
        "members",
        "outputs",
        "policy",
        "prefix",
        "reserved",
        "resumes",
        "started",
        "tally",
        "wrapped_up",
    )

    def __init__(
        self, policy: Policy, started: float, prefix: str = "", before: Budget | None = None
    ) -> None:
        """Create a budget; the caps and the action are those of `policy`.

        Args:
            policy: The policy.
            started: When it begins.
            prefix: Prefix of the names of limits.
            before: The budget that it continues after an interrupt. By default, nothing is used.
        """
        self.policy = policy
        self.started = started
        self.prefix = prefix
        self.tally = Tally()
        self.reserved = Tally()
        self.wrapped_up = False
        """True once a model was asked for the final answer that may exceed a cap."""
        self.members = 0
        """Active invocations in it: after the last one ends, calls are counted but not refused."""
        self.leader: str | None = None
        """The agent that made the first turn in it, e.g. a supervisor."""
        self.outputs: dict[str, int] = {}
        """Largest output of one answer, by model."""
        self.resumes = 0
        """Answers to interrupts since its task began."""
        if before is not None:
            # Between the two, the agent has not run; and each leg has its own iterations.
            self.started -= before.tally.seconds
            self.tally = replace(before.tally, iterations=0)
            self.wrapped_up, self.leader = before.wrapped_up, before.leader
            self.outputs |= before.outputs

    @property
    def is_of_conversation(self) -> bool:
        """True for the budget of a conversation."""
        return self.prefix == CONVERSATION_PREFIX

    @property
    def configured(self) -> dict[str, Any]:
        """Its caps as they are set, which an answer does not change."""
        return dict(self.policy.limits.items())

    def reserve(self, reservation: Reservation) -> None:
        """Reserve usage for a model call."""
        held = self.reserved
        held.turns += reservation.turns
        held.iterations += reservation.iterations
        held.model_calls += reservation.model_calls
        held.input += reservation.input
        held.output += reservation.output
        held.cost_at_most = EXACT.add(held.cost_at_most, reservation.cost)

    def release(self, reservation: Reservation) -> None:
        """Release a reservation."""
        held = self.reserved
        held.turns -= reservation.turns
        held.iterations -= reservation.iterations
        held.model_calls -= reservation.model_calls
        held.input -= reservation.input
        held.output -= reservation.output
        held.cost_at_most = EXACT.subtract(held.cost_at_most, reservation.cost)

    def reached(
        self,
        *,
        with_reserved: bool,
        unpriced_default: Unpriced,
        forces_output: bool = False,
        side: bool = False,
    ) -> Iterator[Reached]:
        """Yield every cap that is reached, with the action of its policy.

        Args:
            with_reserved: Count what in-flight calls have reserved as used.
            unpriced_default: The behavior for calls without a price if the policy sets none.
            forces_output: Skip limits that yield to a call that only forces the output.
            side: Skip limits that a side call cannot exceed.
        """
        # Its last invocation has ended: a refusal could not stop anything.
        if side and not self.members:
            return
        reserved = self.reserved if with_reserved else None
        for breach in self.policy.breaches(self.tally, reserved, self.prefix, unpriced_default):
            if forces_output and breach.yields_to_output:
                continue
            if side and not breach.binds_side_calls:
                continue
            yield self.over_resumes(breach), self.policy.action

    def levels(self) -> tuple[Level, ...]:
        """Return the utilization of each limit."""
        levels = self.policy.limits.levels(self.tally, self.prefix)
        return tuple(map(self.over_resumes, levels)) if self.resumes else levels

    def over_resumes(self, counted: Counted) -> Counted:
        """Note how many resumes a count covers, unless each leg has its own."""
        kind = LIMITS.get(counted.limit.removeprefix(self.prefix))
        if not self.resumes or (kind is not None and kind.per_leg):
            return counted
        return replace(counted, resumes=self.resumes)

    def covers(self, policy: Policy, shared: Limits) -> bool:
        """Return whether this one is always exhausted before one within it with other caps.

        Args:
            policy: The policy of that one.
            shared: Its caps.
        """
        caps, own = self.configured, self.policy
        is_looser = any(
            COMPARED[name](getattr(policy, name), getattr(own, name)) for name in RULES[self.prefix]
        )
        # With another action, it would behave differently at the same cap.
        return (
            own.action == policy.action
            and not is_looser
            and all(name in caps and caps[name] <= cap for name, cap in shared.items())
        )


class Budgets:
    """All budgets of one invocation: its own, then the enclosing trees, innermost first."""

    __slots__ = ("all", "has_cost_limit", "ignores_unpriced", "own", "unpriced_default")

    def __init__(self, own: Budget, trees: tuple[Budget, ...]) -> None:
        """Combine an invocation's own budget with the trees that it shares with others."""
        self.own = own
        self.all = (own, *trees)
        capped = [each.policy for each in self.all if each.policy.limits.max_cost_usd]
        self.has_cost_limit = bool(capped)
        self.unpriced_default = unpriced_by_default(own.policy, [each.policy for each in trees])
        """Behavior for calls without a price if the policy of a budget does not set it."""
        self.ignores_unpriced = any(
            (policy.unpriced or self.unpriced_default) == "warn" for policy in capped
        )
        """True if a cost limit does not cover calls without a known price."""

    def __iter__(self) -> Iterator[Budget]:
        """Iterate over the budgets."""
        return iter(self.all)

    @property
    def outputs(self) -> dict[str, int]:
        """Largest output of one answer by model, as seen by the outermost tree."""
        # It includes every answer of the trees within it.
        return self.all[-1].outputs

    def reserve(self, reservation: Reservation) -> Reservation:
        """Reserve usage in each budget."""
        for budget in self.all:
            budget.reserve(reservation)
        return reservation

    def release(self, reservation: Reservation) -> None:
        """Release a reservation in each budget."""
        for budget in self.all:
            budget.release(reservation)

    def measure_time(self, now: float) -> None:
        """Update the elapsed time, before a decision."""
        for budget in self.all:
            budget.tally.seconds = now - budget.started

    def levels(self) -> tuple[Level, ...]:
        """Return the utilization of each limit; of a tree limit, the highest of all trees."""
        levels: dict[str, Level] = {}
        for budget in self.all:
            for level in budget.levels():
                other = levels.get(level.limit)
                if other is None or other.ratio < level.ratio:
                    levels[level.limit] = level
        return tuple(levels.values())

    def leave_room(self, *, with_reserved: bool = True) -> bool:
        """Return whether no limit is reached that the final answer would itself exceed."""
        return all(
            breach.leaves_room or action == "observe"
            for budget in self.all
            for breach, action in budget.reached(
                with_reserved=with_reserved, unpriced_default=self.unpriced_default
            )
        )

    def claim_wrap_up(self, refusing: Collection[Budget], outermost: Collection[Budget]) -> bool:
        """Claim the final answer of every exhausted budget; False if one has none left.

        Args:
            refusing: Budgets that have refused a tool call, which exhausts them as well.
            outermost: Trees whose last answer this invocation would write.
        """
        spent = self.wrapping_up(refusing, outermost, with_reserved=True)
        # Last, so that a refusal by one budget does not use up another's final answer.
        for budget in spent or ():
            budget.wrapped_up = True
        return spent is not None

    def wrapping_up(
        self, refusing: Collection[Budget], outermost: Collection[Budget], *, with_reserved: bool
    ) -> list[Budget] | None:
        """Return the budgets whose final answer would be used; `None` if one has none left.

        A tree has one: for its outermost member, if that has made a turn.

        Args:
            refusing: Budgets that have refused a tool call, which exhausts them as well.
            outermost: Trees whose last answer this invocation would write.
            with_reserved: Count what in-flight calls have reserved as used.
        """
        if self.own.wrapped_up:
            return None
        spent = [self.own]
        for budget in self.all:
            reached = budget.reached(
                with_reserved=with_reserved, unpriced_default=self.unpriced_default
            )
            breaches = [breach for breach, _ in reached]
            # Budgets that are not exhausted, or only observe, do not matter here.
            if budget.policy.action == "observe" or not (breaches or budget in refusing):
                continue
            if budget.policy.action != "wrap_up" or budget.wrapped_up:
                return None
            # A limit on model calls, for example, would be exceeded by the final answer itself.
            if not all(breach.leaves_room for breach in breaches):
                return None
            if budget is not self.own and budget not in outermost:
                return None
            spent.append(budget)
        return spent


def new_tree(policy: Policy, started: float, before: Budget | None = None) -> Budget:
    """Create the budget tree of a policy; after an interrupt, it continues an earlier one."""
    return Budget(policy.tree_policy(), started, TREE_PREFIX, before)
