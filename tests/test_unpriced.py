"""A cost limit without a known model price always warns or halts."""

from __future__ import annotations

import logging
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits import Limits, Stop, enable
from otel_limits.core.errors import MaxCostReachedError
from otel_limits.observers import log
from otel_limits.testing import ScriptedModel, endless, says, uses

if TYPE_CHECKING:
    from pathlib import Path

    from otel_limits.core.events import Event
    from tests.conftest import MakeAgent

CAP = Limits(max_cost_usd=Decimal("0.0001"), max_turns=13)


@pytest.fixture(autouse=True)
def prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One model has a price, which is none of those that are used here."""
    policy = tmp_path / "limits.yaml"
    policy.write_text("models: {other: {price: {input: 1, output: 1}}}\n", encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))


def runaway(name: str) -> ScriptedModel:
    """Make a model that always asks for tools."""
    return ScriptedModel(endless(uses("search")), model_id=name)


def warnings_of(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    """Every otel-limits warning that contains these words."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and words in record.getMessage()
    ]


def test_each_model_without_a_price_is_warned_of_once(
    make_agent: MakeAgent, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names the model, and says that max_cost_usd does not cover it."""
    enable(CAP)
    for name in ("unheard-of", "unheard-of", "never-heard"):
        assert make_agent(runaway(name))("go").stop_reason == "max_turns"
    said = warnings_of(caplog, "does not cover it")
    assert [name in text for text, name in zip(said, ("unheard-of", "never-heard"), strict=True)]
    assert "max_cost_usd" in said[0]


def test_a_cap_of_a_tree_is_warned_of(
    make_agent: MakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """Like that of an invocation, it does not cover such a model."""
    enable(Limits(max_turns=2), tree=Limits(max_cost_usd=Decimal(1)))
    make_agent(runaway("unheard-of"))("go")
    assert len(warnings_of(caplog, "does not cover it")) == 1


def test_unpriced_model_without_a_cost_cap_logs_no_warning(
    make_agent: MakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """An unknown price is information there, not a gap in enforcement."""
    enable(Limits(max_turns=2))
    with caplog.at_level(logging.INFO, "otel_limits"):
        make_agent(runaway("unheard-of"))("go")
    assert not warnings_of(caplog, "unheard-of")
    assert "No price for model 'unheard-of': " in caplog.text


def test_a_model_that_halts_is_not_said_to_pass(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With OTEL_LIMITS_UNPRICED=halt the cap holds, and the only warning is that of the halt."""
    monkeypatch.setenv("OTEL_LIMITS_UNPRICED", "halt")
    enable(CAP)
    make_agent(runaway("unheard-of"))("go")
    assert not warnings_of(caplog, "does not cover")
    assert len(warnings_of(caplog, "no price for unheard-of")) == 1


def test_models_beyond_a_number_are_warned_of_together(
    make_agent: MakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """Invented names must not fill the log, and the gap is still reported."""
    enable(CAP)
    for number in range(log.MOST_UNPRICED + 3):
        make_agent(ScriptedModel([says("done")], model_id=f"made-up-{number}"))("go")
    said = [*warnings_of(caplog, "does not cover"), *warnings_of(caplog, "More than")]
    assert len(said) == log.MOST_UNPRICED + 1
    assert said[-1].startswith(f"More than {log.MOST_UNPRICED} models have no price")


def test_a_halt_names_the_model_without_a_price(
    make_agent: MakeAgent,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    events: list[Event],
) -> None:
    """The message, the log and the stop all do, and none says that nothing of the cap was used."""
    monkeypatch.setenv("OTEL_LIMITS_UNPRICED", "halt")
    enable(CAP, observers=[events.append])
    model = runaway("unheard-of")
    result = make_agent(model)("go")
    assert (result.stop_reason, model.calls) == ("max_cost_usd", 1)
    (stop,) = [event for event in events if isinstance(event, Stop)]
    note = "no price for unheard-of, so max_cost_usd=0.0001 cannot be kept"
    assert note in str(result.message["content"])
    assert note in caplog.text
    assert stop.breach is not None
    assert stop.breach.note == note
    assert "0 of 0.0001" not in str(result.message["content"]) + caplog.text


def test_a_raise_names_the_model_without_a_price(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception says the same as the message."""
    monkeypatch.setenv("OTEL_LIMITS_UNPRICED", "halt")
    enable(CAP, action="raise")
    with pytest.raises(MaxCostReachedError, match="no price for unheard-of") as raised:
        make_agent(runaway("unheard-of"))("go")
    assert "used" not in str(raised.value)


def test_a_question_names_the_model_without_a_price(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So do the question that a human is asked, and the message where the answer is no."""
    monkeypatch.setenv("OTEL_LIMITS_UNPRICED", "halt")
    enable(CAP, action="ask")
    agent = make_agent(runaway("unheard-of"))
    asked = (agent("go").interrupts or [])[0]
    assert "max_cost_usd: no price for unheard-of" in asked.reason["question"]
    answer: Any = [{"interruptResponse": {"interruptId": asked.id, "response": "no"}}]
    result = agent(answer)
    assert "no price for unheard-of" in str(result.message["content"])


def test_a_tree_names_the_model_without_a_price(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does the cap of a budget tree, by its own name."""
    monkeypatch.setenv("OTEL_LIMITS_UNPRICED", "halt")
    enable(Limits(max_turns=5), tree=Limits(max_cost_usd=Decimal(1)))
    model = runaway("unheard-of")
    result = make_agent(model)("go")
    assert model.calls == 1
    assert "no price for unheard-of, so tree_max_cost_usd=1 " in str(result.message["content"])


def test_unpriced_halt_names_the_cap(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the calls with a price reach it by themselves, nothing else is the reason."""
    monkeypatch.setenv("OTEL_LIMITS_UNPRICED", "halt")
    enable(Limits(max_cost_usd=Decimal("0.00001")))
    result = make_agent(runaway("other"))("go")
    assert "0.000015 of 0.00001 USD used" in str(result.message["content"])


def test_a_halt_names_the_model_that_reports_no_usage(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cap on tokens that an unmeasured call halts is not said to be used up either."""
    monkeypatch.setenv("OTEL_LIMITS_UNMEASURED", "halt")
    enable(Limits(max_token_budget=1_000_000))
    model = ScriptedModel(endless(uses("search", usage=None)), model_id="silent")
    result = make_agent(model)("go")
    assert "no usage was reported by silent, so max_token_budget=1000000" in str(
        result.message["content"]
    )


def test_no_control_character_of_a_name_is_shown(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name comes from outside, and the message goes into the conversation."""
    monkeypatch.setenv("OTEL_LIMITS_UNPRICED", "halt")
    enable(CAP)
    result = make_agent(runaway("a\x1b[31mb\nc"))("go")
    assert (
        "no price for a\N{REPLACEMENT CHARACTER}[31mb\N{REPLACEMENT CHARACTER}c"
        in (result.message["content"][0]["text"])
    )
