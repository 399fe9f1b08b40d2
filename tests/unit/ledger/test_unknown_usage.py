"""An attribute of usage that is not understood is named: in the log, the metrics and the ledger."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from agents import Usage
from openai.types.responses.response_usage import InputTokensDetails

from otel_limits import Limits, ModelCall, disable, enable
from otel_limits.bindings.langchain import scripted_chat_model
from otel_limits.bindings.openai_agents import scripted_agents_model
from otel_limits.cli import main
from otel_limits.testing import says, uses
from tests.features.page import SUBJECTS

if TYPE_CHECKING:
    from otel_limits.core.events import Event
    from tests.conftest import Metric
    from tests.features.subject import Subject

KNOWN = {"inputTokens": 90, "outputTokens": 10, "totalTokens": 100}
UNKNOWN = {"quantumInputTokens": 5}
NAMES = {
    "strands": "quantumInputTokens",
    "langchain": "input_token_details.quantum_tokens",
    "openai-agents": "input_tokens_details.quantum_tokens",
}


def of_langchain(*, is_known: bool) -> Any:
    """The usage of a chat model."""
    sent, answered = (90, 10) if is_known else (0, 0)
    known = {"input_tokens": sent, "output_tokens": answered, "total_tokens": sent + answered}
    return {**known, "input_token_details": {"quantum_tokens": 5}}


def of_openai_agents() -> Usage:
    """The usage of a response, of which the SDK always has the sums."""
    details = InputTokensDetails.model_construct(
        cached_tokens=0, cache_write_tokens=0, quantum_tokens=5
    )
    return Usage(
        requests=1,
        input_tokens=90,
        output_tokens=10,
        total_tokens=100,
        input_tokens_details=details,
    )


@pytest.mark.parametrize(
    ("subject", "is_known"),
    [*((subject, True) for subject in SUBJECTS), *((subject, False) for subject in SUBJECTS[:2])],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.usefixtures("ledger")
def test_attribute_that_is_not_understood_is_named_everywhere(
    subject: Subject,
    metric: Metric,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_known: bool,
) -> None:
    """Once in the log, in each event, counted, and listed with the calls, in every framework."""
    langchain_usage = of_langchain(is_known=is_known)
    monkeypatch.setattr(scripted_chat_model, "_usage", lambda _: langchain_usage)
    monkeypatch.setattr(scripted_agents_model, "_usage", lambda _: of_openai_agents())
    usage = {**(KNOWN if is_known else {}), **UNKNOWN}
    events: list[Event] = []
    enable(Limits(max_turns=9), observers=[events.append])
    model = subject.model([uses("search", usage=usage), says("done", usage=usage)])
    subject.call(subject.agent(model))
    name = NAMES[subject.name]
    calls = [each for each in events if isinstance(each, ModelCall)]
    assert [each.unknown_usage for each in calls] == [(name,)] * 2
    assert {each.kind for each in calls} == {"measured" if is_known else "unmeasured"}
    assert {each.price for each in calls} == {None}
    warnings = [
        each.getMessage()
        for each in caplog.records
        if each.levelno == logging.WARNING and name in each.getMessage()
    ]
    assert len(warnings) == 1
    model_name = calls[0].model
    assert metric("otel_limits_unknown_usage_calls_total", agent="boss", model=model_name) == 2
    disable()
    assert main(["audit", "unmeasured", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["unmeasured"]
    reasons = {(each["reason"], each["calls"]) for each in rows}
    estimated = {("the provider reported no usage, or only a part: estimated", 2)}
    assert reasons == {(f"the rate of its {name} is unknown", 2)} | (
        set() if is_known else estimated
    )
