"""A cost limit without a known model price always warns or halts."""

from __future__ import annotations

import logging
import os
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import REGISTRY

from otel_limits import Limits, ModelCall, Stop, enable, stop_of
from otel_limits.core.errors import MaxCostReachedError
from otel_limits.core.halt_texts import for_model
from otel_limits.core.policy import Verdict
from otel_limits.observers import log
from otel_limits.testing import ScriptedModel, endless, says, uses
from tests.price_list import listed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from strands.agent.agent_result import AgentResult

    from otel_limits.core.events import Event
    from otel_limits.core.policy import Action
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


def sentence_of(result: AgentResult) -> str:
    """Return the operator's sentence about a halt."""
    stop = stop_of(result)
    assert stop is not None
    return stop.sentence


def warnings_of(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    """Every otel-limits warning that contains these words."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and words in record.getMessage()
    ]


def test_usage_of_unknown_meaning_is_warned_of_once_by_its_name(
    make_agent: MakeAgent, events: list[Event], source: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the name, each event of such a call, too, and the metric counts the calls."""
    usage = {"inputTokens": 90, "outputTokens": 10, "totalTokens": 100, "quantumInputTokens": 5}
    enable(Limits(max_turns=3), observers=[events.append])
    make_agent(ScriptedModel(endless(uses("search", usage=usage)), model_id="other"))("go")
    (warning,) = warnings_of(caplog, "quantumInputTokens")
    assert "'other'" in warning
    calls = [each.unknown_usage for each in events if isinstance(each, ModelCall)]
    assert calls == [("quantumInputTokens",)] * 3
    counted = [
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "otel_limits_unknown_usage_calls_total"
    ]
    assert counted == [3]


class Configured(ScriptedModel):
    """A model whose only sign of its ID is the method that every model has."""

    def __init__(self, answers: Iterable[Any]) -> None:
        """Keep no attribute `config`."""
        super().__init__(answers)
        del self.config

    def get_config(self) -> dict[str, str]:
        """Return the configuration."""
        return {"model_id": "other"}


def test_model_without_attributes_is_known_by_its_configuration(
    make_agent: MakeAgent, events: list[Event], source: str
) -> None:
    """Its ID is what prices and metrics need."""
    enable(Limits(max_turns=1), observers=[events.append])
    make_agent(Configured([says("hi")]))("go")
    assert [each.model for each in events if isinstance(each, ModelCall)] == ["other"]


def test_each_model_without_a_price_is_warned_of_once(
    make_agent: MakeAgent, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names the model, and says that max_cost_usd does not cover it."""
    enable(CAP)
    for name in ("unheard-of", "unheard-of", "never-heard"):
        assert make_agent(runaway(name))("go").stop_reason == "max_turns"
    said = warnings_of(caplog, "does not cover such calls")
    assert [name in text for text, name in zip(said, ("unheard-of", "never-heard"), strict=True)]
    assert "max_cost_usd" in said[0]


def test_a_cap_of_a_tree_is_warned_of(
    make_agent: MakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """Like that of an invocation, it does not cover such a model."""
    enable(Limits(max_turns=2), tree=Limits(max_cost_usd=Decimal(1)))
    make_agent(runaway("unheard-of"))("go")
    assert len(warnings_of(caplog, "does not cover such calls")) == 1


def test_unpriced_model_without_a_cost_cap_logs_no_warning(
    make_agent: MakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """An unknown price is information there, not a gap in enforcement."""
    enable(Limits(max_turns=2))
    with caplog.at_level(logging.INFO, "otel_limits"):
        make_agent(runaway("unheard-of"))("go")
    assert not warnings_of(caplog, "unheard-of")
    assert "Cannot price model 'unheard-of': " in caplog.text


def test_a_model_that_halts_is_not_said_to_pass(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With OTEL_LIMITS_UNPRICED=halt the cap holds, and the only warning is that of the halt."""
    monkeypatch.setenv("OTEL_LIMITS_UNPRICED", "halt")
    enable(CAP)
    make_agent(runaway("unheard-of"))("go")
    assert not warnings_of(caplog, "does not cover")
    assert len(warnings_of(caplog, "no price for model 'unheard-of'")) == 1


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
    """The log and the stop do, and neither says that nothing of the cap was used."""
    monkeypatch.setenv("OTEL_LIMITS_UNPRICED", "halt")
    enable(CAP, observers=[events.append])
    model = runaway("unheard-of")
    result = make_agent(model)("go")
    assert (result.stop_reason, model.calls) == ("max_cost_usd", 1)
    (stop,) = [event for event in events if isinstance(event, Stop)]
    note = "no price for model 'unheard-of', so max_cost_usd=0.0001 cannot be enforced"
    assert note in sentence_of(result)
    assert note in caplog.text
    assert stop.breach is not None
    assert stop.breach.note == note
    assert "0 of 0.0001" not in sentence_of(result) + caplog.text


@listed
def test_a_halt_names_the_entry_for_a_listed_model_of_an_unknown_vendor(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The price list has the model: to name its vendor is less work than to write its price."""
    monkeypatch.setenv("OTEL_LIMITS_UNPRICED", "halt")
    enable(CAP)
    sentence = sentence_of(make_agent(runaway("gpt-4o"))("go"))
    assert "no price for model 'gpt-4o', because its class 'ScriptedModel' and its" in sentence
    assert "(`as: openai/gpt-4o` in the policy file names one), so max_cost_usd=" in sentence


def test_a_raise_names_the_model_without_a_price(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception says the same."""
    monkeypatch.setenv("OTEL_LIMITS_UNPRICED", "halt")
    enable(CAP, action="raise")
    with pytest.raises(MaxCostReachedError, match="no price for model 'unheard-of'") as raised:
        make_agent(runaway("unheard-of"))("go")
    assert "used" not in str(raised.value)


def test_a_question_names_the_model_without_a_price(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So do the question that a human is asked, and the stop where the answer is no."""
    monkeypatch.setenv("OTEL_LIMITS_UNPRICED", "halt")
    enable(CAP, action="ask")
    agent = make_agent(runaway("unheard-of"))
    asked = (agent("go").interrupts or [])[0]
    assert "max_cost_usd: no price for model 'unheard-of'" in asked.reason["sentence"]
    answer: Any = [{"interruptResponse": {"interruptId": asked.id, "response": "no"}}]
    result = agent(answer)
    assert "no price for model 'unheard-of'" in sentence_of(result)


def test_a_tree_names_the_model_without_a_price(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does the cap of a budget tree, by its own name."""
    monkeypatch.setenv("OTEL_LIMITS_UNPRICED", "halt")
    enable(Limits(max_turns=5), tree=Limits(max_cost_usd=Decimal(1)))
    model = runaway("unheard-of")
    result = make_agent(model)("go")
    assert model.calls == 1
    assert "no price for model 'unheard-of', so tree_max_cost_usd=1 " in sentence_of(result)


def test_unpriced_halt_names_the_cap(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the calls with a price reach it by themselves, nothing else is the reason."""
    monkeypatch.setenv("OTEL_LIMITS_UNPRICED", "halt")
    enable(Limits(max_cost_usd=Decimal("0.00001")))
    result = make_agent(runaway("other"))("go")
    assert "0.000015 of 0.00001 USD used" in sentence_of(result)


def test_a_halt_names_the_model_that_reports_no_usage(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cap on tokens that an unmeasured call halts is not said to be used up either."""
    monkeypatch.setenv("OTEL_LIMITS_UNMEASURED", "halt")
    enable(Limits(max_token_budget=1_000_000))
    model = ScriptedModel(endless(uses("search", usage=None)), model_id="silent")
    result = make_agent(model)("go")
    assert "model 'silent' reported no usage, so max_token_budget=1000000" in sentence_of(result)


def test_no_control_character_of_a_name_is_shown(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name comes from outside, and the sentence goes into logs and terminals."""
    monkeypatch.setenv("OTEL_LIMITS_UNPRICED", "halt")
    enable(CAP)
    result = make_agent(runaway("a\x1b[31mb\nc"))("go")
    shown = "no price for model 'a\N{REPLACEMENT CHARACTER}[31mb\N{REPLACEMENT CHARACTER}c'"
    assert shown in sentence_of(result)


# --- limits in USD alone --------------------------------------------------------------------------


ONLY_USD = Limits(max_cost_usd=Decimal("0.0001"))


def write_policy(text: str) -> None:
    """Add to the policy file of the test."""
    path = Path(os.environ["OTEL_LIMITS_POLICY"])
    path.write_text(f"{path.read_text(encoding='utf-8')}{text}\n", encoding="utf-8")


@pytest.mark.parametrize("action", ["halt", "wrap_up", "raise", "ask"])
def test_cost_cap_alone_halts_at_the_first_call_without_a_price(
    make_agent: MakeAgent, source: str, action: Action
) -> None:
    """Nothing else could ever end the agent, because its calls would count as 0 USD."""
    enable(ONLY_USD, action=action)
    model = runaway("unheard-of")
    agent = make_agent(model)
    if action == "raise":
        with pytest.raises(MaxCostReachedError, match="no price for model 'unheard-of'"):
            agent("go")
    else:
        agent("go")
    assert model.calls == (2 if action == "wrap_up" else 1)


def test_halt_at_the_only_cap_names_it_as_the_only_one(
    make_agent: MakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """The sentence explains why this halts and the same model elsewhere only warns."""
    enable(ONLY_USD)
    result = make_agent(runaway("unheard-of"))("go")
    note = (
        "no price for model 'unheard-of', so max_cost_usd=0.0001 cannot be enforced, and no other "
        "limit applies"
    )
    assert note in sentence_of(result)
    assert note in caplog.text
    assert not warnings_of(caplog, "count as 0 USD")


def test_first_call_logs_that_unpriced_calls_halt(
    make_agent: MakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """The reader of the log learns the default before it halts an agent."""
    enable(ONLY_USD)
    with caplog.at_level(logging.INFO, "otel_limits"):
        make_agent(runaway("other"))("go")
    assert "enforcing max_cost_usd=0.0001 on agent 'tester' (action=halt, unpriced=halt, " in (
        caplog.text
    )


@pytest.mark.parametrize(
    "other",
    [
        {"max_turns": 5},
        {"max_duration_seconds": 60},
        {"max_identical_tool_calls": 5},
        {"max_calls_per_tool": {"search": 5}},
    ],
    ids=str,
)
def test_any_other_cap_keeps_the_warning(
    make_agent: MakeAgent, caplog: pytest.LogCaptureFixture, other: dict[str, Any]
) -> None:
    """The agent can be halted by it, so a missing price is only reported."""
    enable(ONLY_USD, **other)
    model = ScriptedModel([uses("search"), says("done")], model_id="unheard-of")
    assert make_agent(model)("go").stop_reason == "end_turn"
    assert len(warnings_of(caplog, "count as 0 USD")) == 1


def test_tree_cap_in_usd_alone_halts(make_agent: MakeAgent) -> None:
    """Cost of the tree is as little of a limit as that of the agent."""
    enable(tree=ONLY_USD)
    model = runaway("unheard-of")
    assert make_agent(model)("go").stop_reason == "max_cost_usd"
    assert model.calls == 1


def test_tree_cap_in_another_unit_keeps_the_warning(
    make_agent: MakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """The tree halts the agent."""
    enable(ONLY_USD, tree=Limits(max_turns=3))
    model = runaway("unheard-of")
    assert make_agent(model)("go").stop_reason == "max_turns"
    assert (model.calls, len(warnings_of(caplog, "count as 0 USD"))) == (3, 1)


def test_disabled_loop_limit_is_no_other_cap(make_agent: MakeAgent) -> None:
    """A loop limit of 0 halts no agent."""
    enable(ONLY_USD, max_identical_tool_calls=0)
    model = runaway("unheard-of")
    make_agent(model)("go")
    assert model.calls == 1


def test_unpriced_warn_is_obeyed_where_only_cost_is_limited(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An explicit setting is the choice of its author."""
    monkeypatch.setenv("OTEL_LIMITS_UNPRICED", "warn")
    enable(ONLY_USD)
    model = ScriptedModel([uses("search"), says("done")], model_id="unheard-of")
    assert make_agent(model)("go").stop_reason == "end_turn"
    assert len(warnings_of(caplog, "count as 0 USD")) == 1


def test_limit_that_only_observes_is_no_other_cap(make_agent: MakeAgent) -> None:
    """The tree's owner enforces cost, and the agent within it only observes its turns."""
    write_policy(
        "agents:\n"
        "  outer: {tree: {max_cost_usd: 0.0001}}\n"
        "  inner: {limits: {max_turns: 4}, action: observe}"
    )
    enable()
    inner = runaway("unheard-of")
    outer = make_agent(
        ScriptedModel([uses("inner", arguments={"input": "go"}), says("done")], model_id="other"),
        tools=[make_agent(inner, name="inner").as_tool()],
        name="outer",
    )
    outer("go")
    assert inner.calls == 1


def test_agent_within_a_tree_in_usd_is_halted_although_its_root_has_turns(
    make_agent: MakeAgent,
) -> None:
    """The turns of the root end the root, and never the runaway below it."""
    write_policy("agents: {outer: {limits: {max_turns: 9}, tree: {max_cost_usd: 1}}}")
    enable()
    inner = runaway("unheard-of")
    outer = make_agent(
        ScriptedModel([uses("inner", arguments={"input": "go"}), says("done")], model_id="other"),
        tools=[make_agent(inner, name="inner").as_tool()],
        name="outer",
    )
    outer("go")
    assert inner.calls == 1


@pytest.mark.parametrize(
    ("quota", "calls"),
    [
        ("{model_calls: 4, window: day}", 4),
        ("{model_calls: 4, window: day, where: {agent: test*}}", 4),
        ("{model_calls: 4, window: day, action: observe}", 1),
        ("{model_calls: 4, window: day, where: {agent: else}}", 1),
        ("{model_calls: 4, window: day, where: {baggage.plan: free}}", 1),
        ("{concurrency: 4}", 1),
    ],
)
def test_quota_is_another_cap_if_it_ends_this_agent(
    make_agent: MakeAgent, quota: str, calls: int
) -> None:
    """One that observes, that is of other calls, or that only limits concurrent ones, is none."""
    write_policy(f"quotas: {{daily: {quota}}}")
    enable(ONLY_USD)
    model = runaway("unheard-of")
    make_agent(model)("go")
    assert model.calls == calls


def test_quota_in_usd_alone_refuses_a_model_without_a_price(make_agent: MakeAgent) -> None:
    """It would never be used up, like a cap on cost."""
    write_policy("quotas: {daily: {usd: 1, window: day}}")
    enable()
    model = runaway("unheard-of")
    result = make_agent(model)("go")
    assert (result.stop_reason, model.calls) == ("quota_exceeded", 0)
    assert "because its cost could not be determined." in str(result)


def test_texts_of_a_halt_for_a_missing_price_name_the_price(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model around the agent reads what is missing; to the end user, no budget was reached."""
    monkeypatch.setenv("OTEL_LIMITS_UNPRICED", "halt")
    enable(CAP)
    result = make_agent(runaway("unheard-of"))("go")
    assert "because its cost could not be determined." in str(result)
    breach = stop_of(result).breach  # type: ignore[union-attr]
    assert breach is not None
    assert "the price is unknown" in for_model("a", Verdict(breach.reason, (breach,)))
