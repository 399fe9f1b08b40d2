"""An attribute of usage that is not understood is named: in the log, the metrics and the ledger."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import pytest

from otel_limits import Limits, ModelCall, disable, enable
from otel_limits.cli import main
from otel_limits.testing import says, uses
from tests.features.page import SUBJECTS

if TYPE_CHECKING:
    from otel_limits.core.events import Event
    from tests.conftest import Metric
    from tests.features.subject import Subject

SUMS = {
    True: {"inputTokens": 90, "outputTokens": 10, "totalTokens": 100},
    False: {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0},
}
NAMES = {
    "strands": "quantumInputTokens",
    "langchain": "input_token_details.quantumInputTokens",
    "openai-agents": "input_tokens_details.quantumInputTokens",
}


@pytest.mark.parametrize(
    ("subject", "is_known"),
    [(subject, is_known) for subject in SUBJECTS for is_known in (True, False)],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.usefixtures("ledger")
def test_attribute_that_is_not_understood_is_named_everywhere(
    subject: Subject,
    metric: Metric,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    *,
    is_known: bool,
) -> None:
    """Once in the log, in each event, counted, and listed with the calls, in every framework."""
    usage = {**SUMS[is_known], "quantumInputTokens": 5}
    events: list[Event] = []
    enable(Limits(max_turns=9), observers=[events.append])
    model = subject.model([uses("search", usage=usage), says("done", usage=usage)])
    subject.call(subject.agent(model))
    name = NAMES[subject.name]
    calls = [each for each in events if isinstance(each, ModelCall)]
    assert [each.unknown_usage for each in calls] == [(name,)] * 2
    assert {each.kind for each in calls} == {"measured" if is_known else "estimated"}
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
    estimated = {("estimated: the provider reported no usage, or only a part", 2)}
    assert reasons == {(f"the rate of its {name} is unknown", 2)} | (
        set() if is_known else estimated
    )
