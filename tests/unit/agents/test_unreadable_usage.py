"""Agents whose vendor reports unreadable or partly readable usage: their caps hold."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from prometheus_client import REGISTRY
from strands.types.exceptions import EventLoopException

from otel_limits import Limits, ModelCall, Stop, disable, enable
from otel_limits.testing import ScriptedModel, endless, uses

if TYPE_CHECKING:
    from pathlib import Path

    from otel_limits import Event
    from tests.conftest import MakeAgent

NAN, INFINITE = float("nan"), float("inf")
CAP = 1_000


def every(value: object) -> dict[str, Any]:
    """Say the same of input, output and total."""
    return dict.fromkeys(("inputTokens", "outputTokens", "totalTokens"), value)


USAGES: dict[str, tuple[dict[str, Any], str]] = {
    "no output": ({"inputTokens": 90}, "estimated"),
    "no input": ({"outputTokens": 10}, "estimated"),
    "no output, but a total": ({"inputTokens": 90, "totalTokens": 100}, "measured"),
    "no input, but a total": ({"outputTokens": 10, "totalTokens": 100}, "measured"),
    "a total alone": ({"totalTokens": 100}, "estimated"),
    "a total below its parts": ({"inputTokens": 90, "totalTokens": 3}, "estimated"),
    "nothing": ({}, "estimated"),
    "cached tokens alone": ({"cacheReadInputTokens": 90}, "estimated"),
    "cached tokens, and no input": (
        {"outputTokens": 10, "cacheReadInputTokens": 90, "totalTokens": 20},
        "estimated",
    ),
    "integers of numpy": (
        {"inputTokens": np.int64(90), "outputTokens": np.int32(10), "totalTokens": np.int16(100)},
        "measured",
    ),
    "whole floats": ({"inputTokens": 90.0, "outputTokens": 10.0, "totalTokens": 100.0}, "measured"),
    "an absurd cache": (
        {"inputTokens": 90, "outputTokens": 10, "cacheReadInputTokens": 10**30},
        "measured",
    ),
    "an absurd output": ({"inputTokens": 90, "outputTokens": 10**30}, "estimated"),
    "-1": (every(-1), "estimated"),
    "NaN": (every(NAN), "estimated"),
    "infinite": (every(INFINITE), "estimated"),
    "minus infinite": (every(-INFINITE), "estimated"),
    "10^30": (every(10**30), "estimated"),
    "a truth value": (dict.fromkeys(every(0), True), "estimated"),
    "parts of a token": (every(2.5), "estimated"),
    "NaN of numpy": (every(np.float64("nan")), "estimated"),
    "text": (every("many"), "estimated"),
    "digits as text": (
        {"inputTokens": "90", "outputTokens": "10", "totalTokens": "100"},
        "measured",
    ),
    "None": (every(None), "estimated"),
    "a list": (every([90]), "estimated"),
}
"""Usage reports and the resulting kind of call; fully readable ones are 90 and 10."""

BREAKS_STRANDS = ("text", "digits as text", "None", "a list")
"""Usage that Strands cannot add to its own sums: its agent fails with the first call."""


def ask(make_agent: MakeAgent, usage: dict[str, Any], events: list[Event]) -> str | None:
    """Run an agent that never ends by itself; return why it ended, `None` if Strands failed."""
    enable(Limits(max_token_budget=CAP, max_turns=40), observers=[events.append])
    try:
        return make_agent(ScriptedModel(endless(uses("search", usage=usage))))("go").stop_reason
    except (EventLoopException, TypeError):
        return None


def calls_of(events: list[Event]) -> list[ModelCall]:
    """Every model call that was counted."""
    return [event for event in events if isinstance(event, ModelCall)]


@pytest.mark.parametrize("case", USAGES)
def test_the_cap_holds_and_whole_tokens_are_published(
    make_agent: MakeAgent,
    events: list[Event],
    case: str,
    source: str,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    """A call counts with what is readable and with estimates of the rest, and is never empty."""
    ledger = tmp_path / "ledger.db"
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", str(ledger))
    usage, kind = USAGES[case]
    reason = ask(make_agent, usage, events)
    told = counted()
    disable()  # which writes what is still to be written
    assert reason == (None if case in BREAKS_STRANDS else "max_token_budget")
    calls, (stop,) = calls_of(events), [event for event in events if isinstance(event, Stop)]
    assert {(call.kind, call.estimated) for call in calls} == {(kind, kind == "estimated")}
    assert all(call.usage.total >= 10 for call in calls)
    if kind == "measured":
        assert {(call.usage.input, call.usage.output) for call in calls} == {(90, 10)}
        assert len(calls) == (1 if case in BREAKS_STRANDS else CAP // 100)
    else:  # the estimate of this conversation grows with each turn
        assert len(calls) <= 12
    sums = (sum(call.usage.input for call in calls), sum(call.usage.output for call in calls))
    assert (stop.usage.input, stop.usage.output) == sums
    assert told == sum(sums)
    assert 0 < sum(sums) < 2 * CAP
    with closing(sqlite3.connect(ledger)) as connection:
        sent, answered, cached, number, whole = connection.execute(
            "SELECT sum(input_tokens), sum(output_tokens), max(cache_read_tokens), count(*),"
            " sum(typeof(input_tokens) = 'integer') FROM otel_limits_model_calls"
        ).fetchone()
    assert (sent, answered, number, whole) == (*sums, len(calls), len(calls))
    assert cached <= 90


def counted() -> Decimal:
    """Every token that the metrics have."""
    return sum(
        (
            Decimal(sample.value)
            for metric in REGISTRY.collect()
            for sample in metric.samples
            if sample.name == "otel_limits_tokens_total"
        ),
        Decimal(0),
    )
