"""Quotas applied to real agents, counted in memory."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from opentelemetry import baggage, context
from pydantic import BaseModel
from strands import Agent, tool
from strands.hooks import AfterInvocationEvent, AfterModelCallEvent, BeforeModelCallEvent

import otel_limits
from otel_limits import enable
from otel_limits.core.errors import QuotaExceededError
from otel_limits.core.events import InternalError, ModelCall, QuotaDecision, QuotaUse, Stop
from otel_limits.quotas.client import StoreClient
from otel_limits.quotas.estimates import HALF_LIFE_SECONDS
from otel_limits.runs.registry import LIVE
from otel_limits.testing import FakeTime, ScriptedModel, endless, fails, says, uses

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from otel_limits.core.events import Event
    from tests.conftest import Call, MakeAgent, Metric
    from tests.quotas.fixtures import Hold

PRICES = {"*": {"price": {"input": 1000, "output": 2000}}}
"""A scripted call of 10 input and 5 output tokens costs 0.02 USD."""


def capped(script: Any, cap: int = 5) -> ScriptedModel:
    """A model with an output cap."""
    model = ScriptedModel(script)
    model.update_config(max_tokens=cap)
    return model


def decisions(events: list[Event]) -> list[str]:
    """The quota decisions, in order."""
    return [fact.decision for fact in events if isinstance(fact, QuotaDecision)]


def last_use(events: list[Event], quota: str) -> tuple[Any, Any]:
    """The used and reserved amounts of a quota in its last event."""
    fact = [each for each in events if isinstance(each, QuotaUse) and each.quota == quota][-1]
    return fact.used, fact.reserved


@contextlib.contextmanager
def carrying(**values: str) -> Iterator[None]:
    """Set baggage; `__` in a name becomes a dot."""
    current = context.get_current()
    for name, value in values.items():
        current = baggage.set_baggage(name.replace("__", "."), value, current)
    token = context.attach(current)
    yield
    context.detach(token)


# --- metrics --------------------------------------------------------------------------------------


def test_scrape_shows_quota_decisions_and_usage(
    hold: Hold, make_agent: MakeAgent, metric: Metric
) -> None:
    """Decisions count up by one; used and limit match the store."""
    decided = "otel_limits_quota_decisions_total"
    before = {each: metric(decided, quota="q", decision=each) for each in ("admitted", "refused")}
    hold({"q": {"model_calls": 2, "window": "day"}})
    make_agent(ScriptedModel(endless(uses("search"))))("go")
    grown = {each: metric(decided, quota="q", decision=each) - before[each] for each in before}
    assert grown == {"admitted": 2, "refused": 1}
    for each in ("used", "limit"):
        assert metric(f"otel_limits_quota_{each}", quota="q", key="(all)") == 2


# --- a quota of calls -----------------------------------------------------------------------------


@pytest.mark.parametrize("amount", [1, 2, 5])
def test_quota_of_n_model_calls_admits_exactly_n(
    hold: Hold, make_agent: MakeAgent, source: str, call: Call, amount: int
) -> None:
    """The invocation over quota is halted with a synthetic message and a valid history."""
    hold({"calls": {"model_calls": amount, "window": "day"}})
    model = ScriptedModel(endless(uses("search")))
    agent = make_agent(model)
    result = call(agent)
    assert (result.stop_reason, model.calls) == ("quota_exceeded", amount)
    assert otel_limits.is_synthetic(result.message)
    roles = [message["role"] for message in agent.messages]
    assert roles == ["user", *["assistant", "user"] * amount, "assistant"]
    stop = otel_limits.stop_of(result)
    assert stop is not None
    assert stop.sentence.startswith(
        f"Agent 'tester' was halted by quota_exceeded: quota 'calls' allows {amount} model "
        f"call{'s' * (amount > 1)}: {amount} used, and this call needs 1; resets at "
    )
    assert "T00:00:00Z. The limit is set in limits.yaml:" in stop.sentence
    assert "Run the agent again later, or raise or unblock the quota" in stop.sentence


def test_invocation_over_quota_halts_before_its_first_call(
    hold: Hold, make_agent: MakeAgent, source: str
) -> None:
    """Its model is never called."""
    hold({"calls": {"model_calls": 1, "window": "day"}})
    make_agent(ScriptedModel([says("done")]))("go")
    model = ScriptedModel([says("never")])
    agent = make_agent(model)
    result = agent("go")
    assert (result.stop_reason, model.calls) == ("quota_exceeded", 0)
    assert [message["role"] for message in agent.messages] == ["user", "assistant"]
    stop = otel_limits.stop_of(result)
    assert stop is not None
    assert stop.breach is not None
    assert (stop.breach.limit, stop.breach.cap, stop.breach.observed) == ("calls", 1, 2)


def test_the_next_invocation_after_a_refusal_works(hold: Hold, make_agent: MakeAgent) -> None:
    """A refusal leaves the agent usable."""
    hold({"calls": {"model_calls": 1, "window": "day", "where": {"agent": "tester"}}})
    model = ScriptedModel([says("one"), says("two")])
    agent = make_agent(model)
    assert agent("go").stop_reason == "end_turn"
    assert agent("go").stop_reason == "quota_exceeded"
    agent.name = "another"
    assert agent("go").stop_reason == "end_turn"


def test_agent_without_a_matching_quota_is_not_checked(
    hold: Hold, make_agent: MakeAgent, events: list[Event]
) -> None:
    """No quota event is published."""
    quota = {"model_calls": 1, "window": "day", "where": {"agent": "nightly-*"}}
    hold({"nightly": quota}, observers=[events.append])
    assert make_agent(ScriptedModel([says("done")]))("go").stop_reason == "end_turn"
    assert not [fact for fact in events if isinstance(fact, (QuotaDecision, QuotaUse))]


def test_without_quotas_there_is_no_gate() -> None:
    """Without quotas there is no overhead."""
    enable(otel_limits.Limits(max_turns=1))
    assert LIVE.observers.gate is None


def test_first_quota_added_to_a_policy_file_is_enforced(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_time: FakeTime
) -> None:
    """It applies from the next invocation, without a restart."""
    path = tmp_path / "limits.yaml"
    path.write_text("defaults: {limits: {max_turns: 5}}")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))
    enable()
    agent = make_agent(ScriptedModel(endless(says("done"))))
    assert [agent("go").stop_reason for _ in range(3)] == ["end_turn"] * 3
    path.write_text("quotas: {calls: {model_calls: 1, window: month}}")
    fake_time.advance(1)
    assert [agent("go").stop_reason for _ in range(2)] == ["end_turn", "quota_exceeded"]


def test_disable_stops_enforcing_quotas(hold: Hold, make_agent: MakeAgent) -> None:
    """After `disable()` no call is refused."""
    hold({"calls": {"model_calls": 1, "window": "day"}})
    agent = make_agent(ScriptedModel(endless(says("done"))))
    agent("go")
    otel_limits.disable()
    assert LIVE.observers.gate is None
    assert agent("go").stop_reason == "end_turn"


def test_policy_file_change_updates_quotas(
    hold: Hold, make_agent: MakeAgent, fake_time: FakeTime
) -> None:
    """Usage survives the reload."""
    hold({"calls": {"model_calls": 1, "window": "day"}})
    agent = make_agent(ScriptedModel(endless(says("done"))))
    assert [agent("go").stop_reason for _ in range(2)] == ["end_turn", "quota_exceeded"]
    hold({"calls": {"model_calls": 2, "window": "day"}})
    fake_time.advance(1)
    assert [agent("go").stop_reason for _ in range(2)] == ["end_turn", "quota_exceeded"]


# --- tokens, cost, invocations --------------------------------------------------------------------


def test_tokens_are_reserved_at_worst_case_and_settled_at_actual_usage(
    hold: Hold, make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """Projected input and output cap before the call; reported usage after it."""
    hold({"tokens": {"tokens": 100_000, "window": "day"}}, observers=[events.append])
    make_agent(capped([says("done")], cap=1000), tools=[])("go")
    before, after = (fact for fact in events if isinstance(fact, QuotaUse))
    (decision,) = (fact for fact in events if isinstance(fact, QuotaDecision))
    assert before.used == 0
    assert before.reserved == decision.wanted
    assert 1000 < before.reserved < 1100
    assert (after.used, after.reserved, after.limit) == (15, 0, 100_000)


def test_call_whose_worst_case_does_not_fit_is_refused(hold: Hold, make_agent: MakeAgent) -> None:
    """There is no overshoot where output caps are known."""
    hold({"tokens": {"tokens": 1000, "window": "day"}})
    model = capped([says("never")], cap=1000)
    assert make_agent(model)("go").stop_reason == "quota_exceeded"
    assert model.calls == 0


def test_model_without_a_cap_is_estimated_from_its_history(
    hold: Hold, make_agent: MakeAgent, events: list[Event]
) -> None:
    """4096 output tokens at first; after 20 calls the maximum of them."""
    hold({"tokens": {"tokens": 10**9, "window": "day"}}, observers=[events.append])
    agent = make_agent(ScriptedModel(endless(says("done"))), tools=[])
    for _ in range(21):
        agent.messages.clear()
        agent("go")
    wanted = [int(fact.wanted) for fact in events if isinstance(fact, QuotaDecision)]
    assert 4096 < wanted[0] <= wanted[19]
    assert wanted[20] == wanted[19] - 4096 + 5


@pytest.mark.parametrize(
    "config",
    [
        {"max_tokens": 7},
        {"params": {"max_tokens": 7}},
        {"params": {"max_completion_tokens": 7}},
        {"params": {"max_output_tokens": 7}},
    ],
)
def test_output_cap_is_read_from_each_providers_config(
    hold: Hold, make_agent: MakeAgent, events: list[Event], config: dict[str, Any]
) -> None:
    """Bedrock and Anthropic have it at the top level, OpenAI and Gemini among the parameters."""
    hold({"tokens": {"tokens": 10**6, "window": "day"}}, observers=[events.append])
    model = ScriptedModel([says("done")])
    model.update_config(**config)
    make_agent(model, tools=[])("go")
    (decision,) = (fact for fact in events if isinstance(fact, QuotaDecision))
    assert 7 < int(decision.wanted) < 107


def test_input_that_was_projected_too_low_is_projected_higher(
    hold: Hold, make_agent: MakeAgent, events: list[Event]
) -> None:
    """Projections are raised by the largest recent shortfall."""
    hold({"tokens": {"tokens": 10**6, "window": "day"}}, observers=[events.append])
    usage = {"inputTokens": 5000, "outputTokens": 5, "totalTokens": 5005}
    agent = make_agent(capped(endless(says("done", usage=usage))), tools=[])
    began = time.monotonic()
    for _ in range(2):
        agent.messages.clear()
        agent("go")
    first, second = (int(fact.wanted) for fact in events if isinstance(fact, QuotaDecision))
    assert first < 1000
    # From then on the correction decays: by 6 tokens in a second.
    left = 2 ** ((began - time.monotonic()) / HALF_LIFE_SECONDS)
    assert math.floor(5005 * left) <= second <= 5005


def test_money_is_counted_by_the_price_of_each_call(
    hold: Hold, make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """Exact to the last fraction of a cent."""
    hold({"money": {"usd": 0.03, "window": "day"}}, observers=[events.append], models=PRICES)
    usage = {"inputTokens": 1, "outputTokens": 5, "totalTokens": 6}
    agent = make_agent(capped(endless(says("done", usage=usage))), tools=[])
    reasons = []
    for _ in range(3):
        agent.messages.clear()
        reasons.append(agent("hi").stop_reason)
    spent = sum(fact.price or 0 for fact in events if isinstance(fact, ModelCall))
    assert last_use(events, "money")[0] == spent
    assert spent <= Decimal("0.03")
    assert reasons[-1] == "quota_exceeded"


@pytest.mark.parametrize(
    ("unpriced", "reason", "calls"), [("warn", "end_turn", 1), ("halt", "quota_exceeded", 0)]
)
def test_unpriced_call_follows_the_unpriced_setting(
    hold: Hold,
    make_agent: MakeAgent,
    events: list[Event],
    unpriced: str,
    reason: str,
    calls: int,
) -> None:
    """It is admitted and reported as unpriced, or refused; it never counts as free."""
    hold(
        {"money": {"usd": 5, "window": "day"}},
        observers=[events.append],
        models={"known": PRICES["*"]},
        defaults={"unpriced": unpriced},
    )
    model = capped([says("done")])
    result = make_agent(model)("go")
    assert (result.stop_reason, model.calls) == (reason, calls)
    assert decisions(events) == ["unpriced"]
    stop = otel_limits.stop_of(result)
    refused_by = (
        None if stop is None or stop.quota is None else (stop.quota.quota, stop.quota.limit)
    )
    assert refused_by == (None if calls else ("money", 5))


def test_invocation_is_counted_once(
    hold: Hold, make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """With its first model call; an invocation without model calls does not count."""
    hold({"runs": {"invocations": 2, "window": "day"}}, observers=[events.append])
    agent = make_agent(ScriptedModel(endless(uses("search"))))
    other = make_agent(ScriptedModel([uses("search"), says("a"), says("b"), says("never")]))
    agent.hooks.add_callback(
        BeforeModelCallEvent, lambda event: setattr(event, "cancel", "not today")
    )
    agent("go")
    reasons = [other("go").stop_reason for _ in range(3)]
    assert reasons == ["end_turn", "end_turn", "quota_exceeded"]
    assert last_use(events, "runs") == (2, 0)


def test_all_quotas_that_apply_must_have_enough(
    hold: Hold, make_agent: MakeAgent, events: list[Event]
) -> None:
    """A call refused by one quota uses nothing of the others."""
    hold(
        {
            "many": {"model_calls": 100, "window": "day"},
            "few": {"model_calls": 1, "window": "hour", "key": "agent"},
            "tokens": {"tokens": 10**6, "window": "month"},
        },
        observers=[events.append],
    )
    agent = make_agent(capped(endless(says("done"))))
    reasons = [agent("go").stop_reason for _ in range(3)]
    assert reasons == ["end_turn", "quota_exceeded", "quota_exceeded"]
    assert last_use(events, "many") == (1, 0)
    assert last_use(events, "tokens") == (15, 0)
    assert decisions(events) == ["admitted"] * 3 + ["refused"] * 2


# --- keys -----------------------------------------------------------------------------------------


def test_every_tenant_has_the_whole_amount(hold: Hold, make_agent: MakeAgent, call: Call) -> None:
    """Baggage names the tenant; calls without baggage share one count."""
    hold({"tenants": {"model_calls": 1, "window": "day", "key": "baggage.tenant.id"}})
    agent = make_agent(ScriptedModel(endless(says("done"))))

    def reason(**values: str) -> str:
        with carrying(**values):
            return str(call(agent).stop_reason)

    assert reason(tenant__id="acme") == "end_turn"
    assert reason(tenant__id="acme") == "quota_exceeded"
    assert reason(tenant__id="other") == "end_turn"
    assert [reason(), reason()] == ["end_turn", "quota_exceeded"]
    assert reason(tenant__id="x" * 500) == "end_turn"
    assert reason(tenant__id="y" * 500) == "quota_exceeded"


def test_parent_quota_caps_the_sum_over_all_keys(hold: Hold, make_agent: MakeAgent) -> None:
    """New tenants cannot raise the total."""
    hold(
        {
            "tenants": {"model_calls": 1, "window": "day", "key": "baggage.tenant.id"},
            "all": {"model_calls": 3, "window": "day"},
        }
    )
    agent = make_agent(ScriptedModel(endless(says("done"))))
    reasons = []
    for tenant in range(5):
        with carrying(tenant__id=f"t{tenant}"):
            reasons.append(agent("go").stop_reason)
    assert reasons == ["end_turn"] * 3 + ["quota_exceeded"] * 2


def test_a_trace_attribute_of_the_agent_is_a_key(hold: Hold, make_agent: MakeAgent) -> None:
    """The agent carries it, independent of the caller."""
    hold({"teams": {"model_calls": 1, "window": "day", "key": "attribute.team.id"}})
    for team, reason in (("a", "end_turn"), ("b", "end_turn"), ("a", "quota_exceeded")):
        agent = make_agent(ScriptedModel([says("done")]), trace_attributes={"team.id": team})
        assert agent("go").stop_reason == reason


def test_models_and_agents_are_keys(hold: Hold, make_agent: MakeAgent) -> None:
    """Each pair has the whole amount."""
    hold({"pairs": {"model_calls": 1, "window": "day", "key": "{agent}/{model}"}})
    for name, model, reason in (
        ("a", "m", "end_turn"),
        ("a", "n", "end_turn"),
        ("b", "m", "end_turn"),
        ("a", "m", "quota_exceeded"),
    ):
        agent = make_agent(ScriptedModel([says("done")], model_id=model), name=name)
        assert agent("go").stop_reason == reason


def test_key_values_from_outside_are_published_as_hashes(
    hold: Hold, make_agent: MakeAgent, events: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    """Values from outside appear in no event, message or log."""
    hold(
        {"tenants": {"model_calls": 1, "window": "day", "key": "baggage.tenant.id"}},
        observers=[events.append],
    )
    agent = make_agent(ScriptedModel(endless(says("done"))))
    with carrying(tenant__id="canary"):
        agent("go")
        agent("go")
    assert "canary" not in f"{events} {agent.messages} {caplog.text}"


# --- actions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["quota", "defaults"])
def test_raise_raises_the_quotas_own_error(
    hold: Hold, make_agent: MakeAgent, call: Call, where: str
) -> None:
    """Set by the quota or by the agent's policy."""
    quota: dict[str, Any] = {"model_calls": 1, "window": "day"}
    if where == "quota":
        hold({"calls": quota | {"action": "raise"}})
    else:
        hold({"calls": quota}, defaults={"action": "raise"})
    agent = make_agent(ScriptedModel(endless(uses("search"))))
    with pytest.raises(QuotaExceededError) as caught:
        call(agent)
    assert (caught.value.observed, caught.value.cap) == (2, 1)
    assert otel_limits.is_synthetic(agent.messages[-1])


def test_observe_admits_every_call_and_reports_would_be_refusals(
    hold: Hold, make_agent: MakeAgent, events: list[Event]
) -> None:
    """Usage is still counted."""
    quota = {"model_calls": 1, "window": "day", "action": "observe"}
    hold({"calls": quota}, observers=[events.append])
    agent = make_agent(ScriptedModel([uses("search"), says("done")]))
    assert agent("go").stop_reason == "end_turn"
    assert decisions(events) == ["admitted", "observed"]
    assert last_use(events, "calls") == (2, 0)
    (stop,) = (fact for fact in events if isinstance(fact, Stop))
    assert (stop.action, stop.breach and stop.breach.limit) == ("observed", "calls")


def test_an_observed_quota_does_not_weaken_one_that_is_held(
    hold: Hold, make_agent: MakeAgent
) -> None:
    """Or the reverse."""
    hold(
        {
            "watched": {"model_calls": 1, "window": "day", "action": "observe"},
            "held": {"model_calls": 2, "window": "day"},
        }
    )
    model = ScriptedModel(endless(uses("search")))
    assert make_agent(model)("go").stop_reason == "quota_exceeded"
    assert model.calls == 2


def test_wrap_up_admits_and_counts_one_last_answer(
    hold: Hold, make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """The model gets the reason and no tools, and its answer is the result."""
    quota = {"model_calls": 2, "window": "day", "action": "wrap_up"}
    hold({"calls": quota}, observers=[events.append])
    model = ScriptedModel([uses("search"), uses("search"), says("summary")])
    result = make_agent(model)("go")
    assert (result.stop_reason, str(result).split("\n")[0]) == ("quota_exceeded", "summary")
    assert not otel_limits.is_synthetic(result.message)
    assert model.tool_specs[-1] in ([], None)
    assert "the quota of model calls is used up" in str(model.requests[-1][-1])
    assert last_use(events, "calls") == (3, 0)


def test_last_answer_exceeds_no_quota_that_halts(hold: Hold, make_agent: MakeAgent) -> None:
    """Each quota that refuses a call has to permit it."""
    calls = {"model_calls": 1, "window": "day"}
    hold({"first": calls | {"action": "wrap_up"}, "second": calls})
    model = ScriptedModel(endless(uses("search")))
    result = make_agent(model)("go")
    assert (result.stop_reason, model.calls) == ("quota_exceeded", 1)
    stop = otel_limits.stop_of(result)
    assert stop is not None
    assert "No final answer was requested: a quota admits no further call." in stop.sentence


def test_last_answer_after_a_limit_is_subject_to_quotas(hold: Hold, make_agent: MakeAgent) -> None:
    """A quota refuses it even where the limit would admit it."""
    hold(
        {"calls": {"model_calls": 1, "window": "day", "action": "halt"}},
        defaults={"limits": {"max_turns": 1}, "action": "wrap_up"},
    )
    model = ScriptedModel(endless(uses("search")))
    assert make_agent(model)("go").stop_reason == "quota_exceeded"
    assert model.calls == 1


def test_a_limit_and_a_quota_may_share_the_last_answer(hold: Hold, make_agent: MakeAgent) -> None:
    """There is one last answer, and its reason is the limit."""
    hold(
        {"calls": {"model_calls": 1, "window": "day"}},
        defaults={"limits": {"max_turns": 1}, "action": "wrap_up"},
    )
    model = ScriptedModel([uses("search"), says("summary")])
    result = make_agent(model)("go")
    assert (result.stop_reason, str(result).split("\n")[0]) == ("max_turns", "summary")


def test_ask_action_halts_when_a_quota_is_exceeded(hold: Hold, make_agent: MakeAgent) -> None:
    """Human approval applies to limits only; a quota halts."""
    hold({"calls": {"model_calls": 1, "window": "day"}}, defaults={"action": "ask"})
    result = make_agent(ScriptedModel(endless(uses("search"))))("go")
    assert result.stop_reason == "quota_exceeded"


# --- ends of calls --------------------------------------------------------------------------------


def test_failed_call_releases_its_reservation(
    hold: Hold, make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """It counts as one call without tokens, as in the ledger."""
    hold(
        {
            "calls": {"model_calls": 10, "window": "day"},
            "tokens": {"tokens": 10**6, "window": "day"},
        },
        observers=[events.append],
    )
    with pytest.raises(RuntimeError, match="no model today"):
        make_agent(capped([fails(RuntimeError("no model today"))]))("go")
    assert last_use(events, "calls") == (1, 0)
    assert last_use(events, "tokens") == (0, 0)


def test_every_retry_is_a_call(hold: Hold, make_agent: MakeAgent, events: list[Event]) -> None:
    """Each retry is admitted and counted."""
    hold({"calls": {"model_calls": 10, "window": "day"}}, observers=[events.append])
    agent = make_agent(ScriptedModel(endless(says("done"))))
    left = iter([True, True])

    def retry(event: AfterModelCallEvent) -> None:
        event.retry = next(left, False)

    agent.hooks.add_callback(AfterModelCallEvent, retry)
    agent("go")
    assert last_use(events, "calls") == (3, 0)


@pytest.fixture
def restless() -> Iterator[None]:
    """Make threads switch after a few steps, to provoke races."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_concurrent_threads_count_every_call(hold: Hold, events: list[Event]) -> None:
    """Calls from a tool's own threads count in full."""
    hold({"calls": {"model_calls": 10_000, "window": "day"}}, observers=[events.append])
    helper = ScriptedModel(endless(says("hint")))

    async def ask() -> None:
        for _ in range(100):
            async for _event in helper.stream([]):
                pass

    @tool
    def think() -> str:
        """Ask another model, in four threads."""
        with ThreadPoolExecutor(4) as pool:
            asked = [
                pool.submit(contextvars.copy_context().run, asyncio.run, ask()) for _ in range(4)
            ]
        return f"{len([each.result() for each in asked])} threads"

    model = ScriptedModel([uses("think"), says("done")])
    Agent(model=model, tools=[think], callback_handler=None)("go")
    assert last_use(events, "calls") == (402, 0)


def test_a_resumed_leg_asks_again(hold: Hold, make_agent: MakeAgent) -> None:
    """A refused leg cannot be resumed again."""
    hold({"calls": {"model_calls": 2, "window": "day"}})
    model = ScriptedModel(endless(says("done")))
    agent = make_agent(model)
    agent.hooks.add_callback(
        AfterInvocationEvent, lambda event: setattr(event, "resume", "once more")
    )
    assert agent("go").stop_reason == "quota_exceeded"
    assert model.calls == 2


def test_abandoned_stream_is_settled_at_its_input_at_least(
    hold: Hold, make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """Abandoning a stream does not bypass a quota, and releases its reservation."""
    hold({"tokens": {"tokens": 10**6, "window": "day"}}, observers=[events.append])
    agent = make_agent(capped([says("a long answer")], cap=1000))

    async def leave() -> None:
        stream: Any = agent.stream_async("go")
        async for event in stream:
            if "data" in event:
                break
        await stream.aclose()

    asyncio.run(leave())
    (model_call,) = (fact for fact in events if isinstance(fact, ModelCall))
    assert model_call.usage.input > 0
    make_agent(capped([says("done")]))("go")
    used = [fact.used for fact in events if isinstance(fact, QuotaUse)]
    assert used[-2] == model_call.usage.total
    assert last_use(events, "tokens") == (model_call.usage.total + 15, 0)


def test_opening_and_leaving_a_hundred_times_uses_a_quota_up(
    hold: Hold, make_agent: MakeAgent
) -> None:
    """Each time the input counts."""
    hold({"tokens": {"tokens": 500, "window": "day"}})
    model = capped(endless(says("a long answer")), cap=10)
    agent = make_agent(model, tools=[])

    question = "one question of about ten tokens, no less and no more"

    async def leave() -> None:
        agent.messages.clear()
        stream: Any = agent.stream_async(question)
        async for event in stream:
            if "data" in event:
                break
        await stream.aclose()

    for _ in range(100):
        asyncio.run(leave())
    assert model.calls < 100
    agent.messages.clear()
    assert agent(question).stop_reason == "quota_exceeded"


def test_call_answered_by_a_hook_releases_its_reservation(
    hold: Hold, make_agent: MakeAgent, events: list[Event]
) -> None:
    """No model was called."""
    hold({"calls": {"model_calls": 1, "window": "day"}}, observers=[events.append])
    agent = make_agent(ScriptedModel([says("done")]))
    cancel = iter(["not today", False])
    agent.hooks.add_callback(
        BeforeModelCallEvent, lambda event: setattr(event, "cancel", next(cancel)), order=1000
    )
    agent("go")
    assert agent("go").stop_reason == "end_turn"
    assert last_use(events, "calls") == (1, 0)


def test_agent_as_a_tool_counts_each_call_once(
    hold: Hold, make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """Parent and child are two invocations in one budget tree."""
    hold(
        {
            "calls": {"model_calls": 100, "window": "day"},
            "runs": {"invocations": 100, "window": "day"},
            "tokens": {"tokens": 10**6, "window": "day"},
        },
        observers=[events.append],
    )
    child = make_agent(ScriptedModel([uses("search"), says("found")]), name="child")

    @tool
    def ask_child(question: str = "") -> str:
        """Query the child."""
        return str(child(question))

    parent = make_agent(
        ScriptedModel([uses("ask_child"), says("done")]), name="parent", tools=[ask_child]
    )
    parent("go")
    assert last_use(events, "calls") == (4, 0)
    assert last_use(events, "runs") == (2, 0)
    assert last_use(events, "tokens") == (60, 0)


class Reporting(ScriptedModel):
    """Requests structured output from itself, as provider models do."""

    async def structured_output(self, output_model: Any, prompt: Any, *_: Any, **__: Any) -> Any:
        """Stream an answer and parse it."""
        async for event in self.stream(prompt):
            yield event
        yield {"output": output_model()}


class Verdict(BaseModel):
    """A structured output."""

    verdict: str = "fine"


def test_side_call_counts_without_admission(
    hold: Hold, make_agent: MakeAgent, events: list[Event]
) -> None:
    """It passes no hook where it could wait, so the next call is refused instead."""
    hold({"calls": {"model_calls": 1, "window": "day"}}, observers=[events.append])
    agent = make_agent(Reporting([says("fine"), says("never")]))
    with pytest.warns(DeprecationWarning, match="structured_output"):
        agent.structured_output(Verdict, "go")
    assert agent("go").stop_reason == "quota_exceeded"


@pytest.mark.usefixtures("faulty")
def test_call_counts_if_an_internal_error_has_admitted_it(
    hold: Hold, make_agent: MakeAgent, events: list[Event]
) -> None:
    """The error is reported once, and the next call is counted with it."""
    hold({"calls": {"model_calls": 9, "window": "day"}}, observers=[events.append])
    agent = make_agent(ScriptedModel(endless(says("done"))))
    with patch.object(StoreClient, "reserve", side_effect=RuntimeError("broken")):
        assert agent("go").stop_reason == "end_turn"
    agent("go")
    assert sum(isinstance(each, InternalError) for each in events) == 1
    assert last_use(events, "calls") == (2, 0)


def test_quota_usage_equals_the_published_events(
    hold: Hold, make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """The ledger is written from the same events: the sums are equal."""
    hold(
        {
            "calls": {"model_calls": 100, "window": "day"},
            "tokens": {"tokens": 10**6, "window": "day"},
            "money": {"usd": 100, "window": "day"},
        },
        observers=[events.append],
        models=PRICES,
    )
    agent: Agent = make_agent(
        ScriptedModel(
            [
                uses("search"),
                fails(RuntimeError("once")),
                uses("search", usage=None),
                says("done", usage={"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}),
            ]
        )
    )
    with pytest.raises(Exception, match="once"):
        agent("go")
    agent("go on")
    calls = [fact for fact in events if isinstance(fact, ModelCall)]
    assert last_use(events, "calls") == (len(calls), 0)
    assert last_use(events, "tokens") == (sum(call.usage.total for call in calls), 0)
    assert last_use(events, "money") == (sum(call.price or 0 for call in calls), 0)
