"""Loop detection: repeated, cyclic, failing and fruitless tool calls.

Pure and bounded: the name of the tool and hashes of each call are kept, and the first line of the
last failure.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import date, time, timedelta, tzinfo
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from hashlib import blake2b
from json.encoder import encode_basestring_ascii
from pathlib import PurePath
from typing import Any, Final
from uuid import UUID

IDENTICAL_WINDOW: Final = 20
"""Number of latest calls in which identical ones are counted."""

PERIODS: Final = (2, 3, 4, 5)
"""Lengths of the patterns, in calls."""

# Hashes of 32 characters: a few hundred kilobytes for an endless invocation.
SEEN_CAPACITY: Final = 1_000
"""Results and texts that are kept; the one not seen for longest is dropped first."""

FAILING_CAPACITY: Final = 1_000
"""Tools whose failures are counted: a model can invent any number of names."""

# --- calls ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One finished tool call, as input for loop detection."""

    tool: str
    request: str
    """Fingerprint of name and arguments."""
    result: str
    """Fingerprint of the result."""
    news: str = ""
    """Fingerprint of the result without time stamps and the like; empty if that is `result`."""
    failed: bool | None = None
    """Whether it failed; `None` if it did not run, because a person or a limit refused it."""
    error: str = ""
    """The first line of the failure."""
    exempt: bool = False
    """True if the limits on tool calls ignore it."""

    @property
    def identity(self) -> tuple[str, str]:
        """The values that are equal if one call repeats another."""
        return self.request, self.result


class LoopState:
    """The repetitions of one invocation.

    Each count is the highest that the last turn reached, so that the rest of a batch does not hide
    a repetition. Several calls of one turn are processed one by one, in request order. A turn
    without calls, or with exempt calls only, leaves the three counts of tool calls unchanged.

    Attributes:
        consecutive_same_tool: Consecutive calls of one tool, within the leg.
        identical_tool_calls: Calls with equal request and result among the last 20.
        repeated_tool_cycles: Repetitions of a pattern of 2 to 5 calls, at least two of them
            different, with the same results; 0 until it occurs a second time.
        no_progress_turns: Consecutive turns that added no new tool result and no new text.
        consecutive_tool_failures: Consecutive turns with tool calls in which each one failed.
        failures_by_tool: The same for each tool, whatever others did in the meantime.
    """

    __slots__ = (
        "_culprits",
        "_failures",
        "_in_a_row",
        "_last_tool",
        "_matches",
        "_seen",
        "_window",
        "consecutive_same_tool",
        "consecutive_tool_failures",
        "failures_by_tool",
        "identical_tool_calls",
        "no_progress_turns",
        "repeated_tool_cycles",
    )

    def __init__(self) -> None:
        """Create a state with nothing seen."""
        self.consecutive_same_tool = 0
        self.identical_tool_calls = 0
        self.repeated_tool_cycles = 0
        self.no_progress_turns = 0
        self.consecutive_tool_failures = 0
        self.failures_by_tool: dict[str, int] = {}
        self._last_tool: str | None = None
        self._in_a_row = 0
        self._window: deque[tuple[str, str]] = deque(maxlen=IDENTICAL_WINDOW)
        self._matches = dict.fromkeys(PERIODS, 0)
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._culprits: dict[str, tuple[str | None, int]] = {}
        """By limit: the tool, and the position of its call in the turn."""
        self._failures: dict[str, tuple[str, int]] = {}
        """By tool that fails: the first line of its last failure, and the position of the call."""

    def leg(self) -> None:
        """Start a leg: consecutive calls start again; nothing else is per leg."""
        self.consecutive_same_tool = 0
        self._last_tool = None
        self._in_a_row = 0

    def turn(self, calls: Sequence[Call], text: str | None) -> None:
        """Add a turn: its finished calls in request order, and its text."""
        # Positions among all calls: an exempt one must not shift the nudge to another result.
        judged = [(position, call) for position, call in enumerate(calls) if not call.exempt]
        if judged:
            self._judge_calls(judged)
            self._judge_failures([each for each in judged if each[1].failed is not None])
        if self._adds_anything(calls, text):
            self.no_progress_turns = 0
        # A turn of exempt calls only is neutral: exempt tools are meant to poll.
        elif judged or not calls:
            self.no_progress_turns += 1
        last = calls[-1].tool if calls else None
        self._culprits["max_no_progress_turns"] = (last, max(len(calls) - 1, 0))

    def error_of(self, tool: str) -> str:
        """Return the first line of the last failure of a tool that fails; empty otherwise."""
        return self._failures[tool][0] if tool in self._failures else ""

    def culprit_tool(self, limit: str) -> str | None:
        """Return the tool that raised the count of `limit`, if it was a tool.

        Args:
            limit: Name of a loop limit, such as `max_identical_tool_calls`.
        """
        return self._culprits.get(limit, (None, 0))[0]

    def position(self, limit: str, tool: str | None = None) -> int:
        """Return the position of that call in the last turn.

        Args:
            limit: Name of a loop limit.
            tool: The tool, if the limit is that of one.
        """
        if tool is not None:
            return self._failures[tool][1]
        return self._culprits.get(limit, (None, 0))[1]

    def _judge_calls(self, calls: Sequence[tuple[int, Call]]) -> None:
        counts = [self._add(call) for _, call in calls]
        in_a_row, identical, cycles = zip(*counts, strict=True)
        self.consecutive_same_tool = self._peak("max_consecutive_same_tool", in_a_row, calls)
        self.identical_tool_calls = self._peak("max_identical_tool_calls", identical, calls)
        self.repeated_tool_cycles = self._peak("max_repeated_tool_cycles", cycles, calls)

    def _peak(self, limit: str, counts: Sequence[int], calls: Sequence[tuple[int, Call]]) -> int:
        # The first one that reached the peak: later ones in the turn may be innocent.
        highest = max(counts)
        position, call = calls[counts.index(highest)]
        self._culprits[limit] = (call.tool, position)
        return highest

    def _judge_failures(self, calls: Sequence[tuple[int, Call]]) -> None:
        """Count a turn in which every call failed, and that of each tool."""
        if not calls:
            return
        has_failed = all(call.failed for _, call in calls)
        self.consecutive_tool_failures = self.consecutive_tool_failures + 1 if has_failed else 0
        last, call = calls[-1]
        self._culprits["max_consecutive_tool_failures"] = (call.tool, last)
        for tool in dict.fromkeys(call.tool for _, call in calls):
            own = [each for each in calls if each[1].tool == tool]
            before, position = self.failures_by_tool.pop(tool, 0), own[-1][0]
            self._failures.pop(tool, None)
            if all(call.failed for _, call in own):
                self.failures_by_tool[tool] = before + 1
                self._failures[tool] = own[-1][1].error, position
        while len(self.failures_by_tool) > FAILING_CAPACITY:
            oldest = next(iter(self.failures_by_tool))
            del self.failures_by_tool[oldest], self._failures[oldest]

    def _add(self, call: Call) -> tuple[int, int, int]:
        """Add one call; return the resulting three counts of tool calls."""
        # Per leg, unlike the window: a hook that resumes the agent interrupts a sequence.
        self._in_a_row = self._in_a_row + 1 if call.tool == self._last_tool else 1
        self._last_tool = call.tool
        # Before the call is added to the window, since it is compared with earlier ones.
        self._match_periods(call.identity)
        self._window.append(call.identity)
        return self._in_a_row, self._window.count(call.identity), self._repetitions()

    def _match_periods(self, identity: tuple[str, str]) -> None:
        """Update, per period, how many consecutive calls equaled the one a period before."""
        # Only the length of the match is kept, so each call costs the same however long a loop
        # lasts.
        for period in PERIODS:
            repeats = len(self._window) >= period and self._window[-period] == identity
            self._matches[period] = self._matches[period] + 1 if repeats else 0

    def _repetitions(self) -> int:
        """Return how often the pattern of the last calls has occurred.

        `m` calls that equal the ones a period before form a sequence of `m + period` calls.
        """
        most = 0
        for period, matches in self._matches.items():
            # `max_identical_tool_calls` counts patterns of one call.
            if matches >= period and len(set(list(self._window)[-period:])) > 1:
                most = max(most, matches // period + 1)
        return most

    def _adds_anything(self, calls: Iterable[Call], text: str | None) -> bool:
        """Add results and text; return whether any of them is new.

        A result is new if its tool has not returned it before: different arguments that cause the
        same error again are not progress.
        """
        keys = [fingerprint(call.tool, call.news or call.result) for call in calls]
        if text and text.strip():
            keys.append(fingerprint(text.strip()))
        # A list, because `any` would stop at the first one and skip the others.
        news = [self._is_new(key) for key in keys]
        return any(news)

    def _is_new(self, key: str) -> bool:
        new = key not in self._seen
        self._seen[key] = None
        # Also if it was known: frequent values must outlive rare ones.
        self._seen.move_to_end(key)
        if len(self._seen) > SEEN_CAPACITY:
            self._seen.popitem(last=False)
        return new


# --- fingerprints -----------------------------------------------------------------------------

MAX_PIECES: Final = 200_000
"""Maximum number of parts of one value: more than fits into any model's context."""

SCALARS: Final[Mapping[type, Callable[[Any], str]]] = {
    str: encode_basestring_ascii,
    int: hex,  # `repr` rejects numbers of more than 4,300 digits
    float: repr,
    bool: repr,
    type(None): repr,
}

BASES: Final[Mapping[type, Callable[[Any], object]]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
}
"""How to read a subclass as its base type."""

CLOSING: Final = {"": "", "[": "]", "{": "}", "(": ")"}

VALUES: Final = (complex, date, Decimal, Fraction, PurePath, time, timedelta, tzinfo, UUID)
"""Types whose `str` fully represents their values."""


def fingerprint(*parts: object) -> str:
    """Return an irreversible hash that is equal for equal values.

    The values are written as canonical JSON with sorted keys: a tuple equals a list; bytes and sets
    are compared by content, other objects by type and attributes. Numbers are compared as written:
    `1`, `1.0` and `True` differ, and `nan` equals itself. It never fails; unreadable values,
    circular references and everything after 200,000 parts are skipped.

    Returns:
        32 hexadecimal digits (BLAKE2b).
    """
    # Not Python's `hash`, which differs between processes: ledgers are compared.
    return blake2b("".join(_pieces(parts)).encode("ascii"), digest_size=16).hexdigest()


def _pieces(value: object) -> list[str]:
    """Write `value` without recursion: a runaway agent leaves no stack frames for it."""
    pieces: list[str] = []
    unfinished: list[tuple[object, str, Iterator[object]]] = [(None, "", iter((value,)))]
    path: set[int] = set()
    while unfinished and len(pieces) < MAX_PIECES:
        owner, closing, children = unfinished[-1]
        child = _write_scalars(children, pieces)
        if child is _END:
            # Only now, because its ID cannot be reused while it is on the stack.
            pieces.append(closing)
            path.discard(id(owner))
            unfinished.pop()
        # On the way down only: the same object twice side by side is not a circle.
        elif id(child) in path:
            pieces.append("^")
        else:
            opening, grandchildren = _open(child)
            pieces.append(opening)
            path.add(id(child))
            unfinished.append((child, CLOSING[opening], iter(grandchildren)))
    return pieces


_END: Final = object()


def _write_scalars(children: Iterator[object], pieces: list[str]) -> object:
    """Write the values without parts, up to the first child that has some; return that one."""
    for child in children:
        # By exact type: a subclass may have its own `repr`, and is opened like any other object.
        write = SCALARS.get(type(child))
        if write is None:
            return child
        pieces.append(write(child))
        pieces.append(",")
    return _END


def _open(item: object) -> tuple[str, Iterable[object]]:
    """Return how to write `item`: an opening bracket and the values within."""
    try:
        if isinstance(item, (list, tuple, deque)):
            # Copied in one step: a deque raises if another thread adds to it during iteration.
            return "[", tuple(item)
        if isinstance(item, Mapping):
            # By hash if a key is not text, because keys of different types cannot be compared.
            pairs = sorted(
                item.items(),
                key=lambda pair: pair[0] if type(pair[0]) is str else fingerprint(pair[0]),
            )
            return "{", [each for pair in pairs for each in pair]
        return _open_rare(item)
    except Exception:  # noqa: BLE001  third-party code: only its type is certain
        return "(", (_name(item),)


def _open_rare(item: object) -> tuple[str, Iterable[object]]:
    # Before `str` and `int`, or an enum of either would lose its name.
    if isinstance(item, Enum):
        return "(", (_name(item), item.name)
    for base, as_base in BASES.items():
        if isinstance(item, base):
            return "", (as_base(item),)
    if isinstance(item, (bytes, bytearray, memoryview)):
        return "(", ("bytes", bytes(item).hex())
    if isinstance(item, AbstractSet):
        # Sets have no order, and that of strings differs between processes.
        return "(", ("set", *sorted(map(fingerprint, item)))
    if isinstance(item, VALUES):
        return "(", (_name(item), str(item))
    return "(", (_name(item), _attributes(item))


def _name(item: object) -> str:
    return f"{type(item).__module__}.{type(item).__qualname__}"


def _attributes(item: object) -> dict[str, object]:
    slots = (name for base in type(item).__mro__ for name in base.__dict__.get("__slots__", ()))
    found = {name: getattr(item, name) for name in slots if hasattr(item, name)}
    return {**found, **getattr(item, "__dict__", {})}
