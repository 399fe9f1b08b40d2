"""The projected input of a long conversation: each message is counted once, until it changes."""

from __future__ import annotations

import copy
import inspect
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_limits.bindings.strands import requests
from otel_limits.bindings.strands.requests import (
    ConversationTokens,
    projected_input,
    tokens_of_content,
)
from otel_limits.testing import ScriptedModel
from otel_limits.usage.media import Recipient, recipient

if TYPE_CHECKING:
    from collections.abc import Callable

TO = recipient("openai", "gpt-4o")
MODEL = ScriptedModel([])


def say(words: int) -> dict[str, Any]:
    """Make a message of so many words."""
    return {"role": "user", "content": [{"text": "word " * words}]}


def result(words: int) -> dict[str, Any]:
    """Make a message with the result of a tool, whose text is deep within it."""
    content = [{"text": "found " * words}]
    return {
        "role": "user",
        "content": [{"toolResult": {"toolUseId": "1", "status": "success", "content": content}}],
    }


def edit(messages: list[Any], at: int, words: int) -> None:
    """Change the text of a message in place."""
    block = messages[at]["content"][0]
    target = block["toolResult"]["content"][0] if "toolResult" in block else block
    target["text"] = "edited " * words


CHANGES: dict[str, Callable[[list[Any], int, int], object]] = {
    "append": lambda messages, _, words: messages.append(say(words)),
    "append a result": lambda messages, _, words: messages.append(result(words)),
    "delete": lambda messages, at, _: messages.pop(at),
    "edit": edit,
    "insert": lambda messages, at, words: messages.insert(at, say(words)),
    "replace": lambda messages, at, words: messages.__setitem__(at, result(words)),
    "replace all": lambda messages, _, words: messages.__setitem__(slice(None), [say(words)]),
    "repeat": lambda messages, at, _: messages.append(copy.deepcopy(messages[at])),
    "trim": lambda messages, at, _: messages.__delitem__(slice(at)),
}


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=12),
    st.lists(
        st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 20), st.integers(1, 5)),
        max_size=10,
    ),
)
def test_cached_count_after_changes_equals_full_count(
    start: list[int], changes: list[tuple[str, int, int]]
) -> None:
    """A conversation may be edited, trimmed and replaced between calls: no old count survives."""
    cache = ConversationTokens(chunk_messages=3, max_searches=2)
    messages = [say(words * 100) for words in start]
    for name, at, words in [("append", 0, 1), *changes]:
        if messages or name.startswith("append"):
            CHANGES[name](messages, at % max(len(messages), 1), words * 100)
        sent = copy.deepcopy(messages)  # as Strands does for each call
        # Counts are rounded, and texts are joined by line ends; a message has 100 or more.
        assert abs(cache.count(sent, TO) - tokens_of_content(sent, TO)) <= 2 * len(sent)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of messages that were counted, by call."""
    numbers: list[int] = []

    def count(content: Any, to: Recipient) -> int:
        numbers.append(len(content))
        return tokens_of_content(content, to)

    monkeypatch.setattr(requests, "tokens_of_content", count)
    return numbers


def test_each_message_is_counted_once(counted: list[int]) -> None:
    """The cost of a turn must not grow with the conversation."""
    cache, messages = ConversationTokens(), [say(number) for number in range(1, 1_001)]
    cache.count(copy.deepcopy(messages), TO)
    assert sum(counted) == 1_000
    counted.clear()
    for number in range(40):
        messages.append(result(number))
        cache.count(copy.deepcopy(messages), TO)
    assert sum(counted) == 40


def test_trimmed_conversation_recounts_one_chunk(counted: list[int]) -> None:
    """A sliding window drops the oldest messages before each call."""
    cache, messages = ConversationTokens(), [say(number) for number in range(1, 1_001)]
    cache.count(copy.deepcopy(messages), TO)
    counted.clear()
    del messages[:2]
    cache.count(copy.deepcopy(messages), TO)
    assert sum(counted) == requests.CHUNK_MESSAGES - 2


def test_new_recipient_recounts_all(counted: list[int]) -> None:
    """Vendors count pictures differently."""
    cache, messages = ConversationTokens(), [say(1)] * 10
    cache.count(messages, TO)
    counted.clear()
    cache.count(messages, recipient("anthropic", "claude"))
    assert sum(counted) == 10


def test_count_for_another_model_in_between_keeps_both_counts() -> None:
    """Threads that use one agent may call different models, with other rules for pictures."""
    picture = {"image": {"format": "png", "source": {"bytes": b""}}}
    messages, cache = [{"role": "user", "content": [picture]}], ConversationTokens()
    other = recipient("anthropic", "claude")
    assert tokens_of_content(messages, TO) != tokens_of_content(messages, other)

    class Interrupted(Recipient):
        """Another thread counts while this one looks for earlier counts."""

        def __eq__(self, to: object) -> bool:
            cache.count(messages, other)
            return to == TO

        __hash__ = None  # type: ignore[assignment]

    cache.count(messages, TO)
    assert cache.count(messages, Interrupted(*TO)) == tokens_of_content(messages, TO)


def test_count_near_the_recursion_limit_is_kept() -> None:
    """A runaway agent may have just enough frames left to count, but none to remember."""
    cache, messages = ConversationTokens(), [result(1_000)]

    def count_at(depth: int) -> int:
        return count_at(depth - 1) if depth else projected_input(MODEL, messages, cache=cache)

    frames = len(inspect.stack()) + 22
    assert count_at(sys.getrecursionlimit() - frames) > 900


def test_bytes_that_may_change_are_counted_each_time() -> None:
    """A bytearray can grow without any comparison noticing."""
    text = bytearray(b"%PDF-1.4")
    document = {"document": {"format": "txt", "name": "a", "source": {"bytes": text}}}
    messages, cache = [{"role": "user", "content": [document]}], ConversationTokens()
    before = cache.count(messages, TO)
    text.extend(b" word" * 1_000)
    assert cache.count(messages, TO) > before + 500


class Incomparable:
    """Raises when it is compared, like an array."""

    def __eq__(self, _: object) -> bool:
        """Refuse."""
        raise ValueError

    __hash__ = None  # type: ignore[assignment]


def test_messages_that_cannot_be_compared_are_counted_in_full() -> None:
    """An application can put anything into a message."""
    cache, long = ConversationTokens(), say(1_000)
    projected_input(MODEL, [say(1)], cache=cache)
    strange = [{"role": "user", "content": [{"json": Incomparable()}]}]
    assert projected_input(MODEL, [*strange, long], cache=cache) > 900


def test_zero_usage_is_not_a_baseline() -> None:
    """Strands writes zeros for calls whose provider reported nothing."""
    zeros = {"usage": {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}}
    answer = {"role": "assistant", "content": [{"text": "yes"}], "metadata": zeros}
    assert projected_input(MODEL, [say(1_000), answer]) > 900
