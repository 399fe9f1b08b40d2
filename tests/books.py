"""A second set of books: what is used and reserved, to check each refusal by; for tests alone."""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from otel_limits import ModelCall
from otel_limits.runs.call_tracker import CallTracker
from otel_limits.runs.run import Run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_limits import Breach, Event
    from otel_limits.core.policy import Verdict
    from otel_limits.runs.budget import Budget
    from otel_limits.runs.calls import InFlightCall

ASSUMED: Final = 1024
KEPT: Final = {"max_turns": "turns", "max_model_calls": "model_calls", "max_token_budget": "tokens"}
"""The limits that are checked, and what each counts."""


class Books:
    """The expected usage and reservations of every budget, updated as `CallTracker` is called.

    They are kept under the lock of the runs, so that they are right at every decision.
    """

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.run_of: dict[CallTracker, Run] = {}
        self.used: dict[int, Counter[str]] = {}
        self.calls: dict[InFlightCall, tuple[Run, int]] = {}
        """The in-flight calls, with the tokens that each may still use."""
        self.turns: set[Run] = set()
        """Runs whose loop has a turn reserved."""
        self.retried: dict[Run, int] = {}
        """The tokens of a call of the loop that failed, until it is tried again."""
        self.outputs: dict[tuple[int, str], int] = {}
        self.late: Counter[int] = Counter()
        """Side calls outside a budget: they came after its last member ended, or were read after
        their invocation had ended."""
        self.checked = 0
        self.problems: list[str] = []

    # --- what happens -----------------------------------------------------------------------------

    def began(self, run: Run) -> None:
        """An invocation begins; one that continues a task has used what was used before it."""
        self.runs[run.invocation.id] = self.run_of[run.calls] = run
        for budget in run.budgets:
            tally = budget.tally  # not empty if it continues after an interrupt
            before = {name: getattr(tally, name) for name in KEPT.values()}
            self.used.setdefault(id(budget), Counter(before))

    def __call__(self, event: Event) -> None:
        """Add a published model call: `CallTracker.settle` publishes it, under the lock."""
        if isinstance(event, ModelCall):
            run = self.runs[event.invocation.id]
            self.add(run, "model_calls", 1)
            self.add(run, "tokens", event.usage.total)
            if event.estimated:  # by the texts, which may be more than was assumed of the model
                self.add(run, "estimated", event.usage.output)
            key = id(run.budgets.all[-1]), event.model
            if event.usage.output:  # one that failed is not an answer
                self.outputs[key] = max(self.outputs.get(key, 0), event.usage.output)

    def add(self, run: Run, name: str, number: int) -> None:
        """Add to every budget of an invocation."""
        for budget in run.budgets:
            self.used[id(budget)][name] += number

    def hold(self, run: Run, call: InFlightCall) -> None:
        """Reserve what a call may use."""
        seen = self.outputs.get((id(run.budgets.all[-1]), call.model))
        output = min(call.output_cap or ASSUMED, ASSUMED) if seen is None else seen
        self.calls[call] = run, call.input_estimate + output

    def admitted(
        self, run: Run, call: InFlightCall, verdict: Verdict | None, *, turn: bool
    ) -> None:
        """A call was let out or refused; one of the loop gives up first what it had kept."""
        had_turn = run in self.turns
        if turn:
            self.release_unused(run)
        if call.reservation is not None:
            self.hold(run, call)
            if not turn:
                self.late.update(id(each) for each in run.budgets if not each.members)
        elif verdict is not None:
            self.check(run, verdict, with_reserved=True)
        has_others = any(each is run for each, _ in self.calls.values())
        if turn and (call.reservation is not None or (had_turn and has_others)):
            self.turns.add(run)

    def settled(self, run: Run, call: InFlightCall, *, retried: bool) -> None:
        """A call has ended, and keeps its tokens where it is going to be tried again."""
        _, tokens = self.calls.pop(call, (run, None))
        if retried and call.is_of_loop and tokens is not None:
            self.retried.setdefault(run, tokens)

    def release_unused(self, run: Run) -> None:
        """A loop gives up what it has kept."""
        self.turns.discard(run)
        self.retried.pop(run, None)

    def forget_given_back(self) -> None:
        """Drop the calls that an invocation gave up at its end."""
        self.calls = {call: each for call, each in self.calls.items() if call.reservation}

    # --- what has to hold -------------------------------------------------------------------------

    def check(self, run: Run, verdict: Verdict, *, with_reserved: bool) -> None:
        """Note each breach whose cap is above what these books say."""
        for breach in verdict.breaches:
            name = KEPT.get(breach.limit.removeprefix("tree_"))
            if name is None:
                continue
            self.checked += 1
            found = [
                self.level(budget, name, with_reserved=with_reserved)
                for budget in run.budgets
                if is_of(breach, budget)
            ]
            if not any(each >= breach.cap for each in found):
                self.problems.append(f"refused below its cap: {breach}, and the books say {found}")

    def level(self, budget: Budget, name: str, *, with_reserved: bool) -> int:
        """Usage and reservations of one quantity."""
        reserved = 0
        if with_reserved and name == "turns":
            reserved = sum(budget in run.budgets.all for run in self.turns)
        elif with_reserved:
            beneath = [tokens for run, tokens in self.calls.values() if budget in run.budgets.all]
            kept = [each for run, each in self.retried.items() if budget in run.budgets.all]
            reserved = len(beneath) if name == "model_calls" else sum(beneath) + sum(kept)
        return self.used[id(budget)][name] + reserved

    # --- how --------------------------------------------------------------------------------------

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep them while this lasts."""
        with ExitStack() as stack:
            for owner, name in PLACES:
                around = functools.partial(
                    getattr(self, f"_{name.strip('_')}"), getattr(owner, name)
                )
                stack.enter_context(patch.object(owner, name, bound(around)))
            yield

    def _init(self, original: Any, run: Run, *arguments: Any, **named: Any) -> None:
        original(run, *arguments, **named)
        self.began(run)

    def _check_limits(self, original: Any, run: Run) -> Verdict | None:
        with run.services.lock:
            verdict: Verdict | None = original(run)
            if verdict is not None:
                self.check(run, verdict, with_reserved=False)
        return verdict

    def _admit_by_limits(
        self, original: Any, calls: Any, call: InFlightCall, **how: Any
    ) -> Verdict | None:
        run = self.run_of[calls]
        with run.services.lock:
            verdict: Verdict | None = original(calls, call, **how)
            self.admitted(run, call, verdict, turn=how.get("turn", False))
        return verdict

    def _reserve(self, original: Any, calls: Any, call: InFlightCall) -> None:
        with self.run_of[calls].services.lock:
            original(calls, call)
            self.hold(self.run_of[calls], call)

    def _resume(self, original: Any, calls: Any, call: InFlightCall) -> None:
        with self.run_of[calls].services.lock:
            if call.is_open and call.reservation is None:
                self.late.update(id(each) for each in self.run_of[calls].budgets)
            original(calls, call)

    def _settle(
        self, original: Any, calls: Any, call: InFlightCall, *record: Any, **how: Any
    ) -> None:
        with self.run_of[calls].services.lock:
            original(calls, call, *record, **how)
            retried = how.get("failed", False) and not how.get("aborted", False)
            self.settled(self.run_of[calls], call, retried=retried)

    def _count_turn(self, original: Any, calls: Any, *call: Any) -> int:
        with self.run_of[calls].services.lock:
            number: int = original(calls, *call)
            self.release_unused(self.run_of[calls])
            self.add(self.run_of[calls], "turns", 1)
            return number

    def _release_unused(self, original: Any, calls: Any) -> None:
        with self.run_of[calls].services.lock:
            original(calls)
            self.release_unused(self.run_of[calls])

    def _release(self, original: Any, calls: Any, call: InFlightCall) -> None:
        with self.run_of[calls].services.lock:
            original(calls, call)
            self.calls.pop(call, None)

    def _settle_all(self, original: Any, calls: Any) -> None:
        with self.run_of[calls].services.lock:
            original(calls)
            self.forget_given_back()


PLACES: Final = (
    (Run, "__init__"),
    (Run, "check_limits"),
    *(
        (CallTracker, each)
        for each in ("admit_by_limits", "reserve", "resume", "settle", "settle_all")
    ),
    *((CallTracker, each) for each in ("count_turn", "release_unused", "release")),
)


def bound(around: Any) -> Any:
    """Make a method of it: a partial function is none."""

    def method(*arguments: Any, **named: Any) -> Any:
        return around(*arguments, **named)

    return method


def is_of(breach: Breach, budget: Budget) -> bool:
    """Return whether a breach can be one of this budget."""
    name = breach.limit.removeprefix(budget.prefix)
    caps = dict(budget.policy.limits.items())
    return breach.limit.startswith(budget.prefix) and caps.get(name) == breach.cap
