"""Loops are found as a slow and obvious reference finds them, and fingerprints are of values."""

from __future__ import annotations

import copy
import datetime as dt
import json
import sys
import uuid
from collections import OrderedDict
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_limits.core.limits import LOOP_LIMITS, REPEATED_FAILURES
from otel_limits.core.loops import Call, LoopState, fingerprint

# --- a reference that keeps everything and looks at all of it again ---------------------------


@dataclass(frozen=True)
class Turn:
    """The input of `LoopState.turn`; `new_leg` when a leg starts before it."""

    calls: tuple[Call, ...]
    text: str | None
    new_leg: bool = False


def judged(turns: list[Turn]) -> list[Call]:
    """Every call of these turns that the limits on tool calls see."""
    return [call for turn in turns for call in turn.calls if not call.exempt]


def prefixes(turns: list[Turn]) -> list[list[Call]]:
    """The calls as they were after each judged call of the last turn that had one."""
    while turns and not judged(turns[-1:]):
        turns = turns[:-1]
    before = judged(turns[:-1])
    last = judged(turns[-1:])
    return [before + last[: end + 1] for end in range(len(last))]


def leg_of(turns: list[Turn]) -> list[Turn]:
    """The turns since the last leg began."""
    begins = [number for number, turn in enumerate(turns) if turn.new_leg]
    return turns[begins[-1] :] if begins else turns


def in_a_row(calls: list[Call]) -> int:
    """Calls at the end that are of one tool."""
    count = 0
    while count < len(calls) and calls[-1 - count].tool == calls[-1].tool:
        count += 1
    return count


def identical(calls: list[Call]) -> int:
    """Calls among the last 20 that equal the last one."""
    window = calls[-20:]
    return sum(
        (call.request, call.result) == (calls[-1].request, calls[-1].result) for call in window
    )


def repetitions(calls: list[Call]) -> int:
    """Repetitions of the best pattern of 2 to 5 calls at the end, if more than one."""
    sequence = [(call.request, call.result) for call in calls]
    most = 0
    for period in (2, 3, 4, 5):
        pattern = sequence[-period:]
        times = 0
        while sequence[len(sequence) - period * (times + 1) :][:period] == pattern and (
            period * (times + 1) <= len(sequence)
        ):
            times += 1
        if len(set(pattern)) > 1 and times > 1:
            most = max(most, times)
    return most


def fruitless(turns: list[Turn]) -> int:
    """Turns at the end that brought nothing that had not been there, exempt-only ones aside."""
    seen: set[tuple[str, ...]] = set()
    count = 0
    for turn in turns:
        news = {(call.tool, call.result) for call in turn.calls}
        if turn.text and turn.text.strip():
            news |= {(turn.text.strip(),)}  # type: ignore[arg-type]
        if news - seen:
            count = 0
        elif judged([turn]) or not turn.calls:
            count += 1
        seen |= news
    return count


def failing(turns: list[Turn], tool: str = "") -> int:
    """Turns at the end in which every call, or every one of a tool, failed."""
    count = 0
    for turn in turns:
        ran = [call for call in judged([turn]) if call.failed is not None]
        own = [call for call in ran if not tool or call.tool == tool]
        if own:
            count = count + 1 if all(call.failed for call in own) else 0
    return count


def reference(turns: list[Turn]) -> tuple[object, ...]:
    """The counts after `turns`."""
    every = prefixes(turns)
    return (
        max(map(in_a_row, prefixes(leg_of(turns))), default=0),
        max(map(identical, every), default=0),
        max(map(repetitions, every), default=0),
        fruitless(turns),
        failing(turns),
        {tool: failures for tool in "abc" if (failures := failing(turns, tool))},
    )


def counts(state: LoopState) -> tuple[Any, ...]:
    """The counts of a state."""
    return (
        state.consecutive_same_tool,
        state.identical_tool_calls,
        state.repeated_tool_cycles,
        state.no_progress_turns,
        state.consecutive_tool_failures,
        state.failures_by_tool,
    )


def call(
    name: str, result: str = "same", *, exempt: bool = False, failed: bool | None = False
) -> Call:
    """Make a call: its tool is the first letter of `name`, the rest are its arguments."""
    return Call(
        tool=name[0],
        request=fingerprint(name),
        result=fingerprint(result),
        failed=failed,
        exempt=exempt,
    )


def turns_of(*names: str) -> LoopState:
    """Play one call per turn."""
    state = LoopState()
    for name in names:
        state.turn([call(name)], None)
    return state


CALLS = st.builds(
    call,
    st.sampled_from(["a", "a1", "b", "c"]),
    st.sampled_from(["same", "same", "same", "other"]),
    exempt=st.sampled_from([False, False, False, True]),
    failed=st.sampled_from([True, True, True, False, None]),
)
TURNS = st.builds(
    Turn,
    calls=st.lists(CALLS, max_size=4).map(tuple),
    text=st.sampled_from([None, "", " ", "let me look", "let me look ", "again"]),
    new_leg=st.sampled_from([False, False, False, False, True]),
)
PATTERNS = st.builds(
    lambda head, pattern, times: [*head, *(pattern * times)],
    st.lists(TURNS, max_size=5),
    st.lists(TURNS, min_size=1, max_size=4),
    st.integers(1, 8),
)


# --- counting ---------------------------------------------------------------------------------


@given(st.one_of(st.lists(TURNS, max_size=40), PATTERNS))
def test_every_count_agrees_with_the_reference(turns: list[Turn]) -> None:
    """After each turn of any history, the counts are what the reference finds."""
    state = LoopState()
    for number, turn in enumerate(turns, start=1):
        if turn.new_leg:
            state.leg()
        state.turn(turn.calls, turn.text)
        assert counts(state) == reference(turns[:number])


@given(st.lists(CALLS, min_size=1, max_size=30), st.data())
def test_batches_do_not_change_the_verdict(calls: list[Call], data: st.DataObject) -> None:
    """The highest counts on tool calls are the same in one batch and in any split of it."""
    cut = data.draw(st.integers(0, len(calls)))
    whole, parts = LoopState(), LoopState()
    whole.turn(calls, None)
    highest: tuple[int, ...] = (0, 0, 0)
    for batch in (calls[:cut], calls[cut:]):
        parts.turn(batch, None)
        highest = tuple(map(max, highest, counts(parts)[:3]))
    assert counts(whole)[:3] == highest


def test_consecutive_calls_of_one_tool_ignore_arguments() -> None:
    """Another tool starts again at 1; other arguments don't."""
    assert turns_of("a", "a1", "a2").consecutive_same_tool == 3
    assert turns_of("a", "a1", "b").consecutive_same_tool == 1


def test_new_leg_resets_only_consecutive_calls() -> None:
    """After a leg only `consecutive_same_tool` is back at nothing."""
    state = turns_of("a", "a", "b", "a", "b", "b")
    before = counts(state)
    state.leg()
    assert (before[0], counts(state)) == (2, (0, *before[1:]))
    state.turn([call("b")], None)
    assert state.consecutive_same_tool == 1


def test_repetition_inside_batch_is_detected() -> None:
    """Three calls of one tool followed by another in the same batch count as three."""
    state = LoopState()
    state.turn([call("a"), call("a"), call("a"), call("b")], None)
    assert state.consecutive_same_tool == 3
    state.turn([call("b")], None)
    assert state.consecutive_same_tool == 2


def test_polling_with_new_results_is_not_a_loop() -> None:
    """The same request with other results is never identical, no cycle, and progress."""
    state = LoopState()
    for number in range(50):
        state.turn([call("a", f"{number} %"), call("b", f"{number} lines")], None)
    assert counts(state) == (1, 1, 0, 0, 0, {})


def test_identical_calls_expire_after_twenty_others() -> None:
    """A call counts among the last 20 and no further."""
    others = [f"x{number}" for number in range(19)]
    assert turns_of("a", *others[1:], "a").identical_tool_calls == 2
    assert turns_of("a", *others, "a").identical_tool_calls == 1


def test_identical_calls_need_not_be_consecutive() -> None:
    """Calls in between don't start the count again."""
    assert turns_of("a", "b", "a", "c", "a").identical_tool_calls == 3


@pytest.mark.parametrize(
    ("names", "times"),
    [
        ("ab" * 3, 3),
        ("abc" * 2, 2),
        ("aabcd" * 4, 4),
        ("xy" + "ab" * 3 + "a", 3),
        ("ab", 0),
        ("abcdef" * 3, 0),
        ("aaaaaaaa", 0),
        ("abab" + "x", 0),
    ],
)
def test_cycles_are_patterns_of_two_to_five_different_calls(names: str, times: int) -> None:
    """A pattern counts from its second time on, whatever came before; one call is no pattern."""
    assert turns_of(*names).repeated_tool_cycles == times


def test_turn_without_judged_calls_keeps_call_counts() -> None:
    """An exempt call and a text between two calls are as if they had not been."""
    state = turns_of("a", "a")
    state.turn([call("w", exempt=True)], "waiting")
    assert counts(state)[:3] == (2, 2, 0)
    state.turn([call("a")], None)
    assert counts(state)[:3] == (3, 3, 0)


def test_turns_without_progress_are_counted_consecutively() -> None:
    """A known result and an empty text add nothing; a new text ends the row."""
    state = LoopState()
    observed = []
    for text in ("I look", "I look", "", None, "found it", "found it"):
        state.turn([call("a")], text)
        observed.append(state.no_progress_turns)
    assert observed == [0, 1, 2, 3, 0, 1]


def test_turn_of_exempt_calls_has_progress() -> None:
    """It ends the row when it brings something new, and else leaves it as it is."""
    state = turns_of("a", "a", "a")
    state.turn([call("w", "waiting", exempt=True)], None)
    assert state.no_progress_turns == 0
    state.turn([call("a")], None)
    state.turn([call("w", "waiting", exempt=True)], None)
    assert state.no_progress_turns == 1


def test_an_answer_without_text_and_tools_is_a_turn_without_progress() -> None:
    """An empty response adds nothing."""
    state = LoopState()
    state.turn([], "")
    assert state.no_progress_turns == 1


def test_the_same_error_for_other_arguments_is_no_progress() -> None:
    """A result seen before is not new, even for different arguments."""
    assert turns_of("a1", "a2", "a3").no_progress_turns == 2


def test_loop_memory_is_bounded() -> None:
    """A result is remembered for 1,000 new ones, and is new again after that."""
    state = LoopState()
    results = [call("a", str(number)) for number in range(1_001)]
    for result in results[:1_000]:
        state.turn([result], None)
    state.turn(results[:1], None)
    assert state.no_progress_turns == 1
    state.turn(results[1_000:], None)
    state.turn(results[:1], None)
    assert state.no_progress_turns == 1
    state.turn(results[1:2], None)
    assert state.no_progress_turns == 0


def test_failure_limits_name_the_failing_tool() -> None:
    """With the line of its last error, which goes with its first success."""
    state = LoopState()
    state.turn([replace(call("a", failed=True), error="no key"), call("b")], None)
    assert state.error_of("a") == "no key"
    assert state.position("max_consecutive_failures_per_tool", "a") == 0
    state.turn([call("a")], None)
    assert state.error_of("a") == ""


def test_failing_tools_are_kept_in_bounded_number() -> None:
    """A model can invent any number of names."""
    state = LoopState()
    for number in range(1_100):
        unknown = replace(call("a", failed=True), tool=f"tool {number}")
        state.turn([unknown], None)
    assert len(state.failures_by_tool) == 1_000
    assert state.consecutive_tool_failures == 1_100


@pytest.mark.parametrize(
    "limit",
    [
        each
        for each in LOOP_LIMITS
        if "per_tool" not in each and each not in ("max_consecutive_handoffs", REPEATED_FAILURES)
    ],
)
def test_culprit_is_the_repeating_tool(limit: str) -> None:
    """Blame falls on the tool that the count is about, not on the last of the batch."""
    last_of_turn = ("max_no_progress_turns", "max_consecutive_tool_failures")
    state = LoopState()
    state.turn([call("b"), call("a")], None)
    assert state.culprit_tool(limit) == ("a" if limit in last_of_turn else "b")
    state.turn([call("b"), call("a"), call("a"), call("c")], None)
    expected = dict.fromkeys(last_of_turn, "c")
    assert state.culprit_tool(limit) == expected.get(limit, "a")


def test_repeated_text_has_no_culprit_tool() -> None:
    """A turn without tools is no tool's fault."""
    state = turns_of("a")
    state.turn([], "")
    assert state.culprit_tool("max_no_progress_turns") is None


# --- fingerprints -----------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def shuffled(value: Any) -> Any:
    """Copy a value with every mapping in the opposite order."""
    if isinstance(value, dict):
        return {key: shuffled(value[key]) for key in reversed(value)}
    return [shuffled(each) for each in value] if isinstance(value, list) else copy.copy(value)


@settings(max_examples=25)
@given(JSON, JSON)
def test_fingerprints_are_equal_where_canonical_json_is(one: Any, other: Any) -> None:
    """Two values share a fingerprint exactly when they are written alike."""
    written = [json.dumps(value, sort_keys=True) for value in (one, other)]
    assert (fingerprint(one) == fingerprint(other)) == (written[0] == written[1])
    assert fingerprint(one) == fingerprint(shuffled(one))


@dataclass(frozen=True, slots=True)
class Point:
    """A value with slots."""

    x: int


class Place:
    """A value with attributes."""

    def __init__(self, name: str) -> None:
        self.name = name


class Broken(OrderedDict[str, str]):
    """A mapping that cannot be read."""

    def items(self) -> Any:
        """Fail."""
        raise OSError


class Loud(str):
    """A text that prints itself as another."""

    __slots__ = ()

    def __str__(self) -> str:
        """Hide the text."""
        return "loud"


ME = uuid.UUID(int=5)
DAY = dt.date(2026, 11, 21)


@pytest.mark.parametrize(
    ("one", "equal", "different"),
    [
        ((1, 2), [1, 2], [2, 1]),
        ([[1], 2], [[1], 2], [[1, 2]]),
        (b"a", bytearray(b"a"), "a"),
        ([1, 12.0], [1, 12.0], [17, 2.0]),
        ({0, 8}, frozenset([8, 0]), {0, 9}),
        ({frozenset([0, 8]): 1, frozenset([1]): 2}, {frozenset([8, 0]): 1, frozenset([1]): 2}, {}),
        ({frozenset({1}), "a"}, {"a", frozenset({1})}, {frozenset({2}), "a"}),
        ({1: "a", "x": 2}, {"x": 2, 1: "a"}, {"1": "a", "x": 2}),
        (float("nan"), float("nan"), float("inf")),
        (10**5000, 10**5000, 10**5000 + 1),
        ("\ud800", "\ud800", "\ud801"),
        (Loud("a"), "a", Loud("b")),
        (Point(1), Point(1), Point(2)),
        (Place("a"), Place("a"), Place("b")),
        (ME, uuid.UUID(int=5), str(ME)),
        (DAY, DAY.replace(), DAY.replace(day=1)),
        (Decimal("1.0"), Decimal("1.0"), 1.0),
        (PurePosixPath("/a"), PurePosixPath("/a"), PurePosixPath("/b")),
        (object(), object(), Place("a")),
        (Broken(a="1"), Broken(a="1"), {"a": "1"}),
        ("x" * 1_000_000, "x" * 1_000_000, "x" * 1_000_001),
        (1, 1, 1.0),
        (1, 1, True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_equal_values_have_equal_fingerprints(
    one: object, equal: object, different: object
) -> None:
    """Values, whatever their type, share one with their equals and not with others."""
    assert fingerprint(one) == fingerprint(equal)
    assert fingerprint(one) != fingerprint(different)


def test_recursive_value_has_a_fingerprint() -> None:
    """It is the same for a second value of that shape, and not that of one without the circle."""

    def circle(end: int) -> list[Any]:
        ring: list[Any] = [{"end": end}]
        ring[0]["ring"] = ring
        return ring

    assert fingerprint(circle(1)) == fingerprint(circle(1)) != fingerprint(circle(2))
    ring: list[Any] = [1]
    ring.append(ring)
    assert fingerprint(ring) != fingerprint([1])


def test_depth_does_not_matter() -> None:
    """A value nested deeper than the stack of Python is read to its bottom."""

    def nest(bottom: str) -> object:
        value: object = bottom
        for _ in range(sys.getrecursionlimit() * 3):
            value = [value]
        return value

    assert fingerprint(nest("a")) == fingerprint(nest("a")) != fingerprint(nest("b"))


def test_endless_value_is_read_up_to_a_bound() -> None:
    """A value that doubles with each level has a fingerprint in finite time."""
    value: list[Any] = ["a"]
    for _ in range(200):
        value = [value, value]
    assert len(fingerprint(value)) == 32


def test_parts_are_kept_apart() -> None:
    """The same text cut elsewhere is something else."""
    assert fingerprint("ab", "c") != fingerprint("a", "bc")
