"""Tasks: the usage that limits look at, over interrupts and their answers, and its records."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Final, NoReturn

from otel_limits.core.events import TaskUsage
from otel_limits.core.internal_errors import INTERNAL_ERRORS
from otel_limits.core.limits import LOOP_LIMITS, NO_LIMITS, Limits
from otel_limits.core.loops import LoopState, fingerprint
from otel_limits.core.policy import Policy
from otel_limits.core.usage import SUMS
from otel_limits.runs.budget import Budget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


# --- tasks ----------------------------------------------------------------------------------------
# The usage that limits look at, over an invocation and those that answer its interrupts.

UNKNOWN_INPUT: Final = object()
"""The input of an invocation that the binding does not know."""

MAX_INTERRUPTED: Final = 10_000
"""Interrupts whose tasks are kept in memory; a further one drops the oldest."""

MAX_DAYS: Final = 7
"""Days for which a task waits for an answer."""

UNUSABLE: Final = "The answer to its interrupt begins a new task, with nothing used"


class Task:
    """The usage of an invocation, and of those before it whose interrupts were answered.

    The answer to an interrupt continues a copy, so that a second answer, or a fork, begins with the
    sums of that interrupt. Guarded by the registry's lock, like the budgets in it.
    """

    __slots__ = (
        "_given",
        "_input_hash",
        "budget",
        "calls_by_tool",
        "extension",
        "handoffs",
        "has_nudged",
        "id",
        "is_answered",
        "loops",
        "pending",
        "refused_turns",
        "resumes",
        "tree",
        "warned",
    )

    def __init__(
        self, identity: str, policy: Policy, started: float, before: Task | None = None
    ) -> None:
        """Begin a task, or continue a copy of one that was interrupted.

        Args:
            identity: The ID of the invocation that begins; the first one names the task.
            policy: The policy that applies now.
            started: When it begins. The time of a task runs only while its agent does.
            before: The task as its interrupt has left it.
        """
        if before is not None:
            extended = _above(before.extension, policy.limits)
            policy = policy.extended_to(extended)
        self.id: str = identity
        self.resumes: int = 0
        """Answers to interrupts until now."""
        self._given: object = UNKNOWN_INPUT
        self._input_hash: str = ""
        self.extension: Limits = NO_LIMITS
        """The caps that persons have extended."""
        self.budget: Budget = Budget(policy, started, before=before.budget if before else None)
        self.tree: Budget | None = None
        """The budget tree that begins with it, if one does."""
        self.calls_by_tool: dict[str, int] = {}
        self.refused_turns: int = 0
        """Turns in a row with nothing but refused requests."""
        self.handoffs: int = 0
        """Consecutive hand-offs in its tree, when it was interrupted."""
        self.warned: set[tuple[str, float]] = set()
        """Soft thresholds that were reported, by limit."""
        self.is_answered: bool = False
        """True once an invocation has continued it."""
        self.has_nudged: bool = False
        """True once the model was warned about a loop."""
        self.pending: Sequence[Any] = ()
        """Turns whose tools wait for the answer: `RequestedTurn` of a binding."""
        has_loop_limit = any(kind.name in LOOP_LIMITS for kind, _ in policy.limits.active)
        self.loops: LoopState | None = LoopState() if has_loop_limit else None
        if before is not None:
            self._continue(before)

    def _continue(self, before: Task) -> None:
        self.id, self.resumes = before.id, before.resumes + 1
        self.budget.resumes = self.resumes
        self._input_hash, self.extension = before.input_hash(), before.extension
        self.calls_by_tool |= before.calls_by_tool
        self.refused_turns, self.handoffs = before.refused_turns, before.handoffs
        self.warned |= before.warned
        self.has_nudged, self.pending = before.has_nudged, before.pending
        if self.loops is not None and before.loops is not None:
            self.loops = copy.deepcopy(before.loops)

    @property
    def usage(self) -> TaskUsage:
        """Its usage until now; the time is the one measured last."""
        tally = self.budget.tally
        return TaskUsage(
            id=self.id,
            resumes=self.resumes,
            turns=tally.turns,
            model_calls=tally.model_calls,
            tool_calls=tally.tool_calls,
            usage=tally.usage,
            cost=tally.cost,
            unpriced_calls=tally.unpriced_calls,
            seconds=tally.seconds,
        )

    def begin_with(self, given: object) -> None:
        """Note the user's input, until its hash is computed."""
        self._given = given

    def input_hash(self) -> str:
        """Return the hash of the user's input; empty if that is unknown."""
        # Only now: an input can be large, and few invocations fail.
        if self._given is not UNKNOWN_INPUT:
            self._input_hash, self._given = fingerprint(self._given), UNKNOWN_INPUT
        return self._input_hash

    def extend(self, more: Limits) -> None:
        """Raise the limits to what is used now plus `more`; one that is higher stays."""
        # Relative to the usage rather than the old cap, which may be exceeded by far.
        used = more.extended_by(self.budget.tally, self.calls_by_tool)
        caps = _above(used, self.budget.policy.limits)
        self.extension = caps.merged_over(self.extension)
        self.budget.policy = self.budget.policy.extended_to(caps)

    # --- its record -------------------------------------------------------------------------------

    def record(self) -> str:
        """Return what a framework can keep with an interrupt: its sums, without loops and tools."""
        return record_of(
            {
                "id": self.id,
                "resumes": self.resumes,
                "used": _used(self.budget),
                "tree": None if self.tree is None else _used(self.tree),
                "calls_by_tool": {tool: n for tool, n in self.calls_by_tool.copy().items() if n},
                "refused_turns": self.refused_turns,
                "handoffs": self.handoffs,
                "has_nudged": self.has_nudged,
                "extension": dict(self.extension.items()),
            }
        )

    @classmethod
    def from_record(cls, record: object) -> Task:
        """Return the task of a record, which may contain anything.

        Raises:
            InvalidRecordError: It cannot be used.
        """
        fields = fields_of(record)
        task = cls(fields.text("id"), Policy(), 0)
        task.resumes = fields.count("resumes")
        task.calls_by_tool = fields.counts("calls_by_tool")
        task.refused_turns, task.handoffs = fields.count("refused_turns"), fields.count("handoffs")
        task.has_nudged = fields.flag("has_nudged")
        task.extension = fields.limits("extension")
        _use(task.budget, fields.part("used"))
        if fields.has("tree"):
            task.tree = Budget(Policy(), 0)
            _use(task.tree, fields.part("tree"))
        return task

    def is_continued_by(self, other: Task) -> bool:
        """Return whether another process has continued it since."""
        mine, theirs = self.budget.tally, other.budget.tally
        return (
            other.id == self.id
            and other.resumes > self.resumes
            and all(getattr(theirs, name) >= getattr(mine, name) for name in SUMS)
        )


def _used(budget: Budget) -> dict[str, Any]:
    """Return what a budget has used, for a record."""
    tally = budget.tally
    return {
        **{name: getattr(tally, name) for name in SUMS},
        "cost": str(tally.cost),
        "cost_at_most": str(tally.cost_at_most),
        "unmeasured_model": tally.unmeasured_model,
        "unbounded_model": tally.unbounded_model,
        "unbounded_because": tally.unbounded_because,
        "wrapped_up": budget.wrapped_up,
        "leader": budget.leader or "",
        "outputs": budget.outputs.copy(),
    }


def _use(budget: Budget, fields: RecordFields) -> None:
    """Count in a budget what a record says."""
    tally = budget.tally
    for name in SUMS:
        read = fields.seconds if name == "seconds" else fields.count
        setattr(tally, name, read(name))
    tally.cost = fields.amount("cost")
    tally.cost_at_most = max(fields.amount("cost_at_most"), tally.cost)
    tally.unmeasured_model = fields.text("unmeasured_model")
    tally.unbounded_model = fields.text("unbounded_model")
    tally.unbounded_because = fields.text("unbounded_because")
    budget.wrapped_up = fields.flag("wrapped_up")
    budget.leader = fields.text("leader") or None
    budget.outputs = fields.counts("outputs")


def _above(extension: Limits, limits: Limits) -> Limits:
    """Return the caps of an extension that are above those that apply now, or that these lack."""
    now: dict[str, Any] = dict(limits.items())
    above: dict[str, Any] = {}
    for name, cap in extension.items():
        if isinstance(cap, Mapping):
            own = now.get(name, {})
            above[name] = {tool: each for tool, each in cap.items() if each > own.get(tool, 0)}
        elif name not in now or cap > now[name] > 0:  # 0 turns a loop limit off
            above[name] = cap
    return Limits(**{name: cap for name, cap in above.items() if cap})


class InterruptedTasks:
    """Tasks that wait for the answer to an interrupt, bounded in number and age.

    A binding names an interrupt by a key that it also has when the answer comes. An answered task
    is kept: a second answer to the same interrupt continues from the same sums.
    """

    def __init__(
        self,
        now: Callable[[], float],
        most: int = MAX_INTERRUPTED,
        report: Callable[[int], object] = bool,
    ) -> None:
        """Create an empty store.

        Args:
            now: The clock.
            most: The most interrupts.
            report: Is called with the number of interrupts that were dropped without an answer,
                because there were too many, or because of their age.
        """
        self._now, self._most, self._report = now, most, report
        self._kept: OrderedDict[str, tuple[float, Task]] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Return the number of interrupts."""
        return len(self._kept)

    def keep(self, keys: Iterable[str], task: Task) -> None:
        """Keep the task of an invocation that has ended with interrupts."""
        now, forgotten = self._now(), 0
        with self._lock:
            for key in keys:
                self._kept[key] = now, task
                self._kept.move_to_end(key)
            while self._kept and self._is_over_capacity(now):
                _, (_, dropped) = self._kept.popitem(last=False)
                forgotten += not dropped.is_answered
        if forgotten:
            self._report(forgotten)

    def find(self, keys: Iterable[str]) -> Task | None:
        """Return the task of the interrupts that a call answers; `None` if it is unknown.

        Of several, the one that has used most: an invocation may end with earlier interrupts again.
        """
        oldest = self._now() - MAX_DAYS * 24 * 60 * 60
        with self._lock:
            found = [self._kept[key] for key in keys if key in self._kept]
        tasks = [task for kept, task in found if kept > oldest]
        return max(tasks, key=lambda task: task.resumes, default=None)

    def recall(self, records: Iterable[tuple[str, object]]) -> None:
        """Add what a framework has kept with interrupts, e.g. those of another process.

        A task that is known stays as it is, unless another process has continued it.

        Args:
            records: The keys of interrupts, each with the record of its task.
        """
        for key, record in records:
            known = self.find([key])
            try:
                task = Task.from_record(record)
            except InvalidRecordError as error:
                if known is None:
                    INTERNAL_ERRORS.report("tasks", error, f"{error} {UNUSABLE}")
                continue
            if known is None or known.is_continued_by(task):
                self.keep([key], task)

    def after_fork(self) -> None:
        """Reset in a child process, which may answer the interrupts of its parent."""
        self._lock = threading.RLock()

    def _is_over_capacity(self, now: float) -> bool:
        kept, _ = next(iter(self._kept.values()))
        return len(self._kept) > self._most or now - kept > MAX_DAYS * 24 * 60 * 60


# --- records of interrupted tasks -----------------------------------------------------------------
# One text each, which a framework keeps with the interrupt.
# A record comes back from a store, where it may have been changed.

RECORD_VERSION: Final = 1

MAX_RECORD_LENGTH: Final = 1_000_000
"""Characters; a record usually has about 1,000."""

MAX_SUM: Final = 2**60
"""More than any task can use."""

MAX_SECONDS: Final = 10 * 365 * 24 * 60 * 60

MAX_DIGITS: Final = 20
"""Longer numbers are not even converted, which takes long."""


class InvalidRecordError(ValueError):
    """A record cannot be used; the text says why, without its contents."""

    def __init__(self, problem: str) -> None:
        """Describe the problem."""
        super().__init__(f"The stored record of an interrupted task cannot be used: {problem}.")


def record_of(fields: Mapping[str, Any]) -> str:
    """Return the record with these fields: one text, so that no store changes its numbers."""
    text = json.dumps({"version": RECORD_VERSION, **fields}, default=str)
    return json.dumps({"digest": _digest(text), "task": text})


def fields_of(record: object) -> RecordFields:
    """Return the fields of a record.

    Raises:
        InvalidRecordError: It is not one, or was changed after it was written.
    """
    if not isinstance(record, str):
        raise InvalidRecordError(f"it is not a text but {type(record).__name__}")
    if len(record) > MAX_RECORD_LENGTH:
        raise InvalidRecordError(f"it has {len(record)} characters")
    sealed = RecordFields(_parsed(record))
    text = sealed.text("task")
    if sealed.text("digest") != _digest(text):
        raise InvalidRecordError("it was changed after it was written")
    fields = RecordFields(_parsed(text))
    if (version := fields.count("version")) != RECORD_VERSION:
        raise InvalidRecordError(
            f"its version is {version}, and this release of otel-limits reads {RECORD_VERSION}"
        )
    return fields


def _digest(text: str) -> str:
    # Against accidents and careless edits: a person with access to the store can write any record.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_int=_integer, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise InvalidRecordError("it is not valid JSON") from None


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError
    return int(digits)


def _no_number(name: str) -> NoReturn:  # NaN and infinity
    raise ValueError(name)


class RecordFields:
    """Reads the fields of a record; each raises `InvalidRecordError` if it is not valid."""

    def __init__(self, fields: object) -> None:
        """Take what should be an object of JSON."""
        if not isinstance(fields, dict):
            raise InvalidRecordError("it is not a JSON object")
        self._fields: dict[str, object] = fields

    def has(self, name: str) -> bool:
        """Return whether a field has a value."""
        return self._value(name) is not None

    def part(self, name: str) -> RecordFields:
        """Return the fields of a field."""
        return RecordFields(self._value(name))

    def text(self, name: str) -> str:
        """Return a text."""
        value = self._value(name)
        return value if isinstance(value, str) else _refuse(name)

    def flag(self, name: str) -> bool:
        """Return true or false."""
        value = self._value(name)
        return value if isinstance(value, bool) else _refuse(name)

    def count(self, name: str) -> int:
        """Return a count."""
        return _count(name, self._value(name))

    def counts(self, name: str) -> dict[str, int]:
        """Return counts by name."""
        value = self._value(name)
        if not isinstance(value, dict):
            _refuse(name)
        return {key: _count(name, each) for key, each in value.items()}

    def seconds(self, name: str) -> float:
        """Return a duration."""
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            _refuse(name)
        return value if math.isfinite(value) and 0 <= value <= MAX_SECONDS else _refuse(name)

    def amount(self, name: str) -> Decimal:
        """Return USD."""
        return _amount(name, self.text(name))

    def limits(self, name: str) -> Limits:
        """Return caps."""
        value = self._value(name)
        if not isinstance(value, dict):
            _refuse(name)
        caps: dict[str, Any] = value
        if isinstance(cost := caps.get("max_cost_usd"), str):
            caps = {**caps, "max_cost_usd": _amount(name, cost)}
        try:
            return Limits(**caps)
        except (TypeError, ValueError):
            _refuse(name)

    def _value(self, name: str) -> object:
        if name not in self._fields:
            raise InvalidRecordError(f"{name} is missing")
        return self._fields[name]


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(name)
    return value if 0 <= value <= MAX_SUM else _refuse(name)


def _amount(name: str, text: str) -> Decimal:
    try:
        value = Decimal(text)
    except InvalidOperation:
        _refuse(name)
    return value if value.is_finite() and 0 <= value <= MAX_SUM else _refuse(name)


def _refuse(name: str) -> NoReturn:
    raise InvalidRecordError(f"{name} is not valid")
