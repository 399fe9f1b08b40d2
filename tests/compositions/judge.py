"""Rules that hold for every run of a program, in any framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from otel_limits import Halt, ModelCall, Stop
from otel_limits.core.events import CUT_SHORT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from otel_limits import Breach
    from otel_limits.runs.budget import Budget
    from tests.books import Books
    from tests.compositions.run import Run

Entry: TypeAlias = tuple[Literal["requested", "answered", "other"], str]
"""A part of a conversation: a request for a tool or its result, with its ID, or anything else."""


def problems_of(run: Run, books: Books) -> Iterator[str]:
    """Yield every broken rule."""
    runs = list(books.runs.values())
    yield from books.problems
    trees = {id(tree): tree for each in runs for tree in each.trees}.values()
    largest = max((f.usage.total for f in run.events if isinstance(f, ModelCall)), default=0)
    for budget in (*(each.budget for each in runs), *trees):
        if budget.policy.action != "observe":
            larger = largest + books.used[id(budget)]["estimated"]
            yield from over(budget, larger, books.late[id(budget)])
        held = budget.reserved
        if (held.turns, held.model_calls, held.tokens, held.cost) != (0, 0, 0, 0):
            yield f"never released: {held}"
    yield from tallied(books)
    for each in runs:
        if each.parent is None and each.invocation.agent != run.program.agents[0].name:
            yield f"{each.invocation.agent} belongs to no tree of the outermost agent"
    for event in run.events:
        if isinstance(event, Halt) and event.breaches and not reached(event.breaches[0]):
            yield f"halted below its cap: {event.breaches[0]}"
    yield from (f"the reader of {name} has a context of its agent" for name in run.leaks)
    yield from halted_without_limit(run, books)
    yield from invalid_histories(run)
    told, made = sum(each.part.model_calls for each in runs), run.outcome.requests.total()
    # A canceled call counts even if it did not reach its model: only the vendor knows.
    canceled = sum(
        isinstance(f, ModelCall) and f.kind == "failed" and f.estimated for f in run.events
    )
    if not made <= told <= made + canceled:
        yield f"{made} calls were made, and {told} were published"


def tallied(books: Books) -> Iterator[str]:
    """Yield trees that are not the sums of their members, over all answers to interrupts."""
    runs = books.runs.values()
    same: dict[object, list[Budget]] = {}
    for run in runs:
        if run.task.tree is not None:
            same.setdefault(run.task.id, []).append(run.task.tree)
    known = [tree for trees in same.values() for tree in trees]
    for tree in (tree for run in runs for tree in run.trees if tree not in known):  # of a group
        same.setdefault(id(tree), [tree])
    for trees in same.values():
        below = [run.part for run in runs if any(tree in run.trees for tree in trees)]
        for name in ("turns", "model_calls", "tokens", "tool_calls"):
            parts = sum(getattr(each, name) for each in below)
            whole = getattr(trees[-1].tally, name)
            if parts != whole:
                yield f"{name} of a tree are {whole}, and {parts} of its members"


def over(budget: Budget, largest: int, late: int) -> Iterator[str]:
    """Yield the caps that were passed by more than one last answer, and tokens by more than a call.

    Args:
        budget: What is capped.
        largest: Tokens of the largest call.
        late: Side calls that came too late to be held by it.
    """
    caps, used = dict(budget.policy.limits.items()), budget.tally
    last = int(budget.wrapped_up and budget.policy.action == "wrap_up")
    for name, most in (
        ("model_calls", caps.get("max_model_calls", 10**9) + late),
        ("turns", caps.get("max_turns", 10**9) + last),
        ("tool_calls", caps.get("max_tool_calls", 10**9)),
        ("tokens", caps.get("max_token_budget", 10**9) - 1 + largest * (1 + last + late)),
    ):
        if getattr(used, name) > most:
            yield f"{budget.prefix}{name} are {getattr(used, name)}, of {caps} and {last} more"


def reached(breach: Breach) -> bool:
    """Return whether a limit was reached by usage plus reservations."""
    return breach.observed >= breach.cap and 0 <= breach.reserved <= breach.observed


def halted_without_limit(run: Run, books: Books) -> Iterator[str]:
    """Yield the halts that no limit explains."""
    limited = {each.invocation.id for each in books.runs.values() if each.is_limited}
    for event in run.events:
        if isinstance(event, Halt) and event.invocation.id not in limited:
            yield f"halted without a limit: {event.sentence}"


def invalid_histories(run: Run) -> Iterator[str]:
    """Yield the agents that have answered or were halted, and have a request without a result."""
    ends = {event.agent: event for event in run.events if isinstance(event, Stop)}
    for agent, history in run.histories:
        end = ends.get(agent)
        has_ended = end is not None and (end.action in CUT_SHORT or end.reason == "end_turn")
        if has_ended and not is_valid(history):
            yield f"history of {agent}: {history[-6:]}"


def is_valid(history: Iterable[Entry]) -> bool:
    """Return whether every requested tool has its result before anything else follows."""
    pending: list[str] = []
    is_answering = False
    for kind, identity in history:
        if kind == "answered":
            if identity not in pending:
                return False
            pending.remove(identity)
            is_answering = True
        elif pending and (kind == "other" or is_answering):
            return False
        elif kind == "requested":
            pending.append(identity)
            is_answering = False
    return not pending
