"""Tells an agent that goes round in circles: repeated, cyclic and fruitless tool calls.

Pure and bounded: nothing is kept of a call but its tool's name and two hashes.
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
"""Calls among which equal ones are counted."""

PERIODS: Final = (2, 3, 4, 5)
"""Lengths of the patterns that are looked for, in calls."""

# Hashes of 32 characters: some hundred kilobytes for an invocation that never ends.
SEEN_CAPACITY: Final = 1_000
"""Results and texts that are remembered; the one not met for longest is forgotten first."""

# --- calls ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One finished tool call, as far as loops are concerned."""

    tool: str
    request: str
    """Fingerprint of name and arguments."""
    result: str
    """Fingerprint of what came back."""
    exempt: bool = False
    """True when this tool may repeat itself: the limits on tool calls don't see it."""

    @property
    def identity(self) -> tuple[str, str]:
        """What two calls share when one repeats the other."""
        return self.request, self.result


class LoopState:
    """What one invocation repeats.

    Each count says what the last turn reached, so that a repetition in the middle of a batch is
    not hidden by the rest of it. Several calls of one turn are taken one by one, in the order of
    the requests. A turn without calls, or with exempt calls alone, leaves the three counts of
    tool calls as they are.

    Attributes:
        consecutive_same_tool: Calls of one tool in a row, within the leg.
        identical_tool_calls: Calls with equal request and result among the last 20.
        repeated_tool_cycles: How often the calls went through the same pattern of 2 to 5 calls,
            at least two of them different, with the same results; 0 until it comes a second time.
        no_progress_turns: Turns in a row that added no new tool result and no new text.
    """

    __slots__ = (
        "_blamed",
        "_in_a_row",
        "_last_tool",
        "_matches",
        "_seen",
        "_window",
        "consecutive_same_tool",
        "identical_tool_calls",
        "no_progress_turns",
        "repeated_tool_cycles",
    )

    def __init__(self) -> None:
        """Begin with nothing seen."""
        self.consecutive_same_tool = 0
        self.identical_tool_calls = 0
        self.repeated_tool_cycles = 0
        self.no_progress_turns = 0
        self._last_tool: str | None = None
        self._in_a_row = 0
        self._window: deque[tuple[str, str]] = deque(maxlen=IDENTICAL_WINDOW)
        self._matches = dict.fromkeys(PERIODS, 0)
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._blamed: dict[str, tuple[str | None, int]] = {}
        """By limit: which tool, and the position of its call in the turn."""

    def leg(self) -> None:
        """A leg begins: calls in a row start again; nothing else is per leg."""
        self.consecutive_same_tool = 0
        self._last_tool = None
        self._in_a_row = 0

    def turn(self, calls: Sequence[Call], text: str | None) -> None:
        """Take in one turn: its finished calls in the order of the requests, and its text."""
        # Positions among all calls: an exempt one in front must not send the nudge to another
        # result.
        judged = [(position, call) for position, call in enumerate(calls) if not call.exempt]
        if judged:
            self._judge_calls(judged)
        if self._adds_anything(calls, text):
            self.no_progress_turns = 0
        # A turn of exempt calls alone says nothing either way: polling is what they are exempt for.
        elif judged or not calls:
            self.no_progress_turns += 1
        last = calls[-1].tool if calls else None
        self._blamed["max_no_progress_turns"] = (last, max(len(calls) - 1, 0))

    def culprit_tool(self, limit: str) -> str | None:
        """The tool that brought the count of `limit` to where it is, if it was a tool.

        Args:
            limit: Name of a loop limit, such as `max_identical_tool_calls`.
        """
        return self._blamed.get(limit, (None, 0))[0]

    def position(self, limit: str) -> int:
        """Where among the calls of the last turn that one stands."""
        return self._blamed.get(limit, (None, 0))[1]

    def _judge_calls(self, calls: Sequence[tuple[int, Call]]) -> None:
        counts = [self._take(call) for _, call in calls]
        in_a_row, identical, cycles = zip(*counts, strict=True)
        self.consecutive_same_tool = self._peak("max_consecutive_same_tool", in_a_row, calls)
        self.identical_tool_calls = self._peak("max_identical_tool_calls", identical, calls)
        self.repeated_tool_cycles = self._peak("max_repeated_tool_cycles", cycles, calls)

    def _peak(self, limit: str, counts: Sequence[int], calls: Sequence[tuple[int, Call]]) -> int:
        # The first that reached the peak: what follows it in the turn may be innocent.
        highest = max(counts)
        position, call = calls[counts.index(highest)]
        self._blamed[limit] = (call.tool, position)
        return highest

    def _take(self, call: Call) -> tuple[int, int, int]:
        """Add one call; what it brings the three counts of tool calls to."""
        # The window is per invocation, the row per leg: a human's answer between two calls ends a
        # row.
        self._in_a_row = self._in_a_row + 1 if call.tool == self._last_tool else 1
        self._last_tool = call.tool
        # Before the call is in the window, as it is compared with those before it.
        self._match_periods(call.identity)
        self._window.append(call.identity)
        return self._in_a_row, self._window.count(call.identity), self._repetitions()

    def _match_periods(self, identity: tuple[str, str]) -> None:
        """Keep, per period, how many calls in a row equalled the one a period before."""
        # Only how long the match has lasted is kept, instead of comparing stretches of calls anew:
        # each call costs the same, however long a loop goes on.
        for period in PERIODS:
            repeats = len(self._window) >= period and self._window[-period] == identity
            self._matches[period] = self._matches[period] + 1 if repeats else 0

    def _repetitions(self) -> int:
        """How often the pattern came that the last calls follow.

        `m` calls that equal the ones a period before make a stretch of `m + period` calls.
        """
        most = 0
        for period, matches in self._matches.items():
            # A pattern of one call is what `max_identical_tool_calls` counts.
            if matches >= period and len(set(list(self._window)[-period:])) > 1:
                most = max(most, matches // period + 1)
        return most

    def _adds_anything(self, calls: Iterable[Call], text: str | None) -> bool:
        """Remember results and text; True when any of them is new.

        A result is new when its tool has not returned it before: different arguments that only
        bring the same error again are not progress.
        """
        keys = [fingerprint(call.tool, call.result) for call in calls]
        if text and text.strip():
            keys.append(fingerprint(text.strip()))
        # A list and not a generator: `any` would end at the first, and the others would
        # not be remembered.
        news = [self._is_new(key) for key in keys]
        return any(news)

    def _is_new(self, key: str) -> bool:
        new = key not in self._seen
        self._seen[key] = None
        # Also when it was there: what comes again and again must not be forgotten for
        # what came once.
        self._seen.move_to_end(key)
        if len(self._seen) > SEEN_CAPACITY:
            self._seen.popitem(last=False)
        return new


# --- fingerprints -----------------------------------------------------------------------------

MAX_PIECES: Final = 200_000
"""Where the reading of one value ends: more than any model's context holds."""

SCALARS: Final[Mapping[type, Callable[[Any], str]]] = {
    str: encode_basestring_ascii,
    int: hex,  # `repr` refuses a number of more than 4,300 digits
    float: repr,
    bool: repr,
    type(None): repr,
}

BASES: Final[Mapping[type, Callable[[Any], object]]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
}
"""How a subclass is read as what it stands for."""

CLOSING: Final = {"": "", "[": "]", "{": "}", "(": ")"}

VALUES: Final = (complex, date, Decimal, Fraction, PurePath, time, timedelta, tzinfo, UUID)
"""Types whose `str` says all that their values are."""


def fingerprint(*parts: object) -> str:
    """Hash values so that equal ones have equal fingerprints and nothing can be read from them.

    The values are written as canonical JSON, keys sorted: a tuple is a list, bytes and sets are
    taken by content, other objects by type and attributes. Numbers are taken as they are written:
    `1`, `1.0` and `True` differ, and `nan` equals itself. It never fails; what cannot be read,
    refers to itself or comes after 200,000 pieces is left out.

    Returns:
        32 hexadecimal digits (BLAKE2b).
    """
    # A digest and not Python's `hash`, which differs from process to process: ledgers are compared.
    return blake2b("".join(_pieces(parts)).encode("ascii"), digest_size=16).hexdigest()


def _pieces(value: object) -> list[str]:
    """Write `value` without recursion: a runaway agent leaves no frames for it."""
    pieces: list[str] = []
    unfinished: list[tuple[object, str, Iterator[object]]] = [(None, "", iter((value,)))]
    path: set[int] = set()
    while unfinished and len(pieces) < MAX_PIECES:
        owner, closing, children = unfinished[-1]
        child = _write_scalars(children, pieces)
        if child is _END:
            # Its id is free only now: while it was on the stack, no other object could have got the
            # same.
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
    """Write what has no parts, up to the first child that has some, which is returned."""
    for child in children:
        # By exact type: a subclass may write itself in any way, and is opened like a foreign
        # object.
        write = SCALARS.get(type(child))
        if write is None:
            return child
        pieces.append(write(child))
        pieces.append(",")
    return _END


def _open(item: object) -> tuple[str, Iterable[object]]:
    """How `item` is written: an opening bracket and the values within."""
    try:
        if isinstance(item, (list, tuple, deque)):
            # A copy made in one step: a deque raises when another thread adds to it meanwhile.
            return "[", tuple(item)
        if isinstance(item, Mapping):
            # By hash where a key is not text, as keys of several types cannot be compared.
            pairs = sorted(item.items(), key=lambda pair: _order(pair[0]))
            return "{", [each for pair in pairs for each in pair]
        return _open_rare(item)
    except Exception:  # noqa: BLE001  it is foreign, and its type is all that is known of it
        return "(", (_name(item),)


def _open_rare(item: object) -> tuple[str, Iterable[object]]:
    # Before `str` and `int`: an enum of either would be read as its value, and lose its name.
    if isinstance(item, Enum):
        return "(", (_name(item), item.name)
    for base, as_base in BASES.items():
        if isinstance(item, base):
            return "", (as_base(item),)
    if isinstance(item, (bytes, bytearray, memoryview)):
        return "(", ("bytes", bytes(item).hex())
    if isinstance(item, AbstractSet):
        # Sets have no order, and that of strings differs from process to process.
        return "(", ("set", *sorted(map(fingerprint, item)))
    if isinstance(item, VALUES):
        return "(", (_name(item), str(item))
    return "(", (_name(item), _attributes(item))


def _order(key: object) -> str:
    return key if type(key) is str else fingerprint(key)


def _name(item: object) -> str:
    return f"{type(item).__module__}.{type(item).__qualname__}"


def _attributes(item: object) -> dict[str, object]:
    slots = (name for base in type(item).__mro__ for name in base.__dict__.get("__slots__", ()))
    found = {name: getattr(item, name) for name in slots if hasattr(item, name)}
    return {**found, **getattr(item, "__dict__", {})}
