"""The details of a refused call: the quota, its usage and the retry time."""

from __future__ import annotations

import time
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest
from opentelemetry import baggage, context

import otel_limits
from otel_limits.core.usage import QuotaRefusal
from otel_limits.testing import ScriptedModel, endless, says

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold

DAY = 86_400
USAGE = {"inputTokens": 2, "outputTokens": 5, "totalTokens": 7}


def the_day_ends() -> float:
    """The next midnight in UTC."""
    return (time.time() // DAY + 1) * DAY


def test_refusal_reports_usage_and_reset_time(hold: Hold, make_agent: MakeAgent) -> None:
    """In the stop of the result, also after the conversation was stored and restored."""
    hold({"calls": {"model_calls": 1, "window": "day", "key": "agent"}})
    agent = make_agent(ScriptedModel(endless(says("done"))), name="joe")
    agent("go")
    stop = otel_limits.stop_of(agent("go"))
    assert stop is not None
    assert stop.quota is not None
    assert stop.quota == QuotaRefusal(
        quota="calls",
        key="joe",
        unit="model calls",
        used=1,
        reserved=0,
        limit=1,
        resets_at=the_day_ends(),
        retry_after_seconds=stop.quota.retry_after_seconds,
    )
    assert stop.quota.retry_after_seconds is not None
    assert 0 <= stop.quota.retry_after_seconds - (the_day_ends() - time.time()) < 60


def test_money_stays_exact_in_a_refusal(hold: Hold, make_agent: MakeAgent) -> None:
    """Also through JSON, in the metadata of the message."""
    prices = {"*": {"price": {"input": 1000, "output": 2000}}}
    hold({"money": {"usd": 0.02, "window": "day"}}, models=prices)
    model = ScriptedModel(endless(says("done", usage=USAGE)))
    model.update_config(max_tokens=5)
    agent = make_agent(model, tools=[])
    agent("hi")
    refused = otel_limits.stop_of(agent("hi"))
    assert refused is not None
    assert refused.quota is not None
    assert (refused.quota.used, refused.quota.limit) == (Decimal("0.012"), Decimal("0.02"))


def test_an_exception_carries_the_refusal(hold: Hold, make_agent: MakeAgent) -> None:
    """Under the action `raise`."""
    hold({"calls": {"model_calls": 1, "window": "day", "action": "raise"}})
    agent = make_agent(ScriptedModel(endless(says("done"))))
    agent("go")
    with pytest.raises(otel_limits.QuotaExceededError) as caught:
        agent("go")
    stop = caught.value.stop
    assert stop is not None
    assert stop.quota is not None
    assert (stop.quota.used, stop.quota.limit) == (1, 1)


def test_the_span_carries_the_refusal(
    hold: Hold, make_agent: MakeAgent, spans: InMemorySpanExporter
) -> None:
    """As attributes of the agent's span."""
    hold({"calls": {"model_calls": 1, "window": "day"}})
    agent = make_agent(ScriptedModel(endless(says("done"))))
    agent("go")
    spans.clear()
    agent("go")
    (span,) = (each for each in spans.get_finished_spans() if each.name.startswith("invoke_agent"))
    attributes = dict(span.attributes or {})
    assert attributes["otel_limits.quota.quota"] == "calls"
    assert attributes["otel_limits.quota.used"] == 1
    assert attributes["otel_limits.quota.resets_at"] == the_day_ends()


def test_remaining_quota_uses_the_key_of_the_current_baggage(
    hold: Hold, make_agent: MakeAgent
) -> None:
    """Unless other baggage is passed."""
    hold({"calls": {"model_calls": 3, "window": "day", "key": "baggage.tenant"}})
    token = context.attach(baggage.set_baggage("tenant", "acme"))
    try:
        make_agent(ScriptedModel(endless(says("done"))))("go")
        here = otel_limits.remaining("calls")
        there = otel_limits.remaining("calls", baggage={"tenant": "globex"})
    finally:
        context.detach(token)
    assert (here.left, there.left) == (2, 3)
    assert "acme" not in here.key


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("call", r"No quota named 'call' is enforced. Did you mean calls?"),
        ("calls", r"Quota 'calls' has one count per agent: pass agent=…"),
    ],
)
def test_invalid_remaining_query_raises_a_clear_error(hold: Hold, name: str, sentence: str) -> None:
    """An unknown quota name, or a missing key."""
    hold({"calls": {"model_calls": 3, "window": "day", "key": "agent"}})
    with pytest.raises(ValueError, match=sentence):
        otel_limits.remaining(name)


def test_a_query_before_anything_is_enabled_names_the_remedy() -> None:
    """The policy file may be set, but it has not been read."""
    with pytest.raises(ValueError, match=r"is not enabled in this process\. Call otel_limits\."):
        otel_limits.remaining("calls")
