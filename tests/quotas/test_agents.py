"""What quotas do to real agents, counted in memory."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import baggage, context
from pydantic import BaseModel
from strands import Agent, tool
from strands.hooks import AfterInvocationEvent, AfterModelCallEvent, BeforeModelCallEvent

import otel_limits
from otel_limits import enable
from otel_limits.core.errors import QuotaExceededError
from otel_limits.core.events import ModelCall, QuotaDecision, QuotaUse, Stop
from otel_limits.quotas.estimates import HALF_LIFE_SECONDS
from otel_limits.runs.registry import LIVE
from otel_limits.testing import ScriptedModel, endless, fails, says, uses

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from otel_limits.core.events import Event
    from tests.conftest import Call, MakeAgent, Metric
    from tests.quotas.conftest import Hold

PRICES = {"*": {"price": {"input": 1000, "output": 2000}}}
"""A scripted call of 10 input and 5 output tokens costs 0.02 USD."""


def capped(script: Any, cap: int = 5) -> ScriptedModel:
    """A model that says how much it may answer."""
    model = ScriptedModel(script)
    model.update_config(max_tokens=cap)
    return model


def decisions(events: list[Event]) -> list[str]:
    """What quotas decided, in order."""
    return [fact.decision for fact in events if isinstance(fact, QuotaDecision)]


def last_use(events: list[Event], quota: str) -> tuple[Any, Any]:
    """What is used and reserved of a quota by the last fact about it."""
    fact = [each for each in events if isinstance(each, QuotaUse) and each.quota == quota][-1]
    return fact.used, fact.reserved


@contextlib.contextmanager
def carrying(**values: str) -> Iterator[None]:
    """Put baggage around what is called; `__` stands for a dot."""
    current = context.get_current()
    for name, value in values.items():
        current = baggage.set_baggage(name.replace("__", "."), value, current)
    token = context.attach(current)
    yield
    context.detach(token)


# --- what is exposed ------------------------------------------------------------------------------


def test_a_scrape_shows_what_quotas_decided_and_how_they_stand(
    hold: Hold, make_agent: MakeAgent, metric: Metric
) -> None:
    """Decisions go up by one each; use and limit are those of the store."""
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
def test_a_quota_of_n_model_calls_permits_exactly_n(
    hold: Hold, make_agent: MakeAgent, source: str, call: Call, amount: int
) -> None:
    """One under way is halted with a message that no model wrote, and its history stays valid."""
    hold({"calls": {"model_calls": amount, "window": "day"}})
    model = ScriptedModel(endless(uses("search")))
    agent = make_agent(model)
    result = call(agent)
    assert (result.stop_reason, model.calls) == ("quota_exceeded", amount)
    assert otel_limits.is_synthetic(result.message)
    roles = [message["role"] for message in agent.messages]
    assert roles == ["user", *["assistant", "user"] * amount, "assistant"]
    (content,) = result.message["content"]
    assert content["text"].startswith(
        f"Agent 'tester' was halted by quota_exceeded: quota calls permits {amount} model calls "
        f"and with this call {amount + 1} model calls could be used: {amount} are used, 0 reserved "
        "by calls under way; it begins again in "
    )
    assert "T00:00:00Z. The limit is set in limits.yaml:" in content["text"]
    assert "Wait for the quota to reset" in content["text"]


def test_an_invocation_that_may_not_start_ends_at_once(
    hold: Hold, make_agent: MakeAgent, source: str
) -> None:
    """The model hears nothing of it."""
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
    """When there is something left for it."""
    hold({"calls": {"model_calls": 1, "window": "day", "where": {"agent": "tester"}}})
    model = ScriptedModel([says("one"), says("two")])
    agent = make_agent(model)
    assert agent("go").stop_reason == "end_turn"
    assert agent("go").stop_reason == "quota_exceeded"
    agent.name = "another"
    assert agent("go").stop_reason == "end_turn"


def test_without_a_quota_that_applies_nothing_is_asked(
    hold: Hold, make_agent: MakeAgent, events: list[Event]
) -> None:
    """No fact about quotas is told."""
    quota = {"model_calls": 1, "window": "day", "where": {"agent": "nightly-*"}}
    hold({"nightly": quota}, observers=[events.append])
    assert make_agent(ScriptedModel([says("done")]))("go").stop_reason == "end_turn"
    assert not [fact for fact in events if isinstance(fact, (QuotaDecision, QuotaUse))]


def test_without_quotas_there_is_no_gate() -> None:
    """Nobody is asked anything."""
    enable(otel_limits.Limits(max_turns=1))
    assert LIVE.observers.gate is None


UNTOUCHED = """
import sys
import otel_limits
from strands import Agent
from otel_limits.testing import ScriptedModel, says
otel_limits.enable()
Agent(model=ScriptedModel([says("done")]), callback_handler=None)("go")
assert otel_limits.disable() is None
known = {name for name in sys.modules if name.startswith(("otel_limits.quotas.", "redis"))}
known -= {"otel_limits.quotas.stores", "otel_limits.quotas.windows"}  # what settings may say
sys.exit(repr(known) if known else 0)
"""


@pytest.mark.parametrize("policy", [None, "defaults: {limits: {max_turns: 5}}"])
def test_without_quotas_nothing_of_them_is_imported(policy: str | None, tmp_path: Path) -> None:
    """Neither our modules nor the client of the store, by an agent that runs to its end."""
    variables = {"OTEL_LIMITS_QUIET": "true", "OTEL_LIMITS_MAX_TURNS": "5"}
    if policy is not None:
        variables["OTEL_LIMITS_POLICY"] = str(tmp_path / "limits.yaml")
    (tmp_path / "limits.yaml").write_text(policy or "")
    done = subprocess.run(
        [sys.executable, "-c", UNTOUCHED],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_policy_file_that_gets_its_first_quota_holds_it(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From the next invocation on, without a restart."""
    monkeypatch.setattr("otel_limits.settings.policy.file.LOOK_INTERVAL_SECONDS", 0.0)
    path = tmp_path / "limits.yaml"
    path.write_text("defaults: {limits: {max_turns: 5}}")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))
    enable()
    agent = make_agent(ScriptedModel(endless(says("done"))))
    assert [agent("go").stop_reason for _ in range(3)] == ["end_turn"] * 3
    path.write_text("quotas: {calls: {model_calls: 1, window: month}}")
    assert [agent("go").stop_reason for _ in range(2)] == ["end_turn", "quota_exceeded"]


def test_off_means_off(hold: Hold, make_agent: MakeAgent) -> None:
    """After `disable()` nothing is refused."""
    hold({"calls": {"model_calls": 1, "window": "day"}})
    agent = make_agent(ScriptedModel(endless(says("done"))))
    agent("go")
    otel_limits.disable()
    assert LIVE.observers.gate is None
    assert agent("go").stop_reason == "end_turn"


def test_a_policy_file_that_changes_changes_quotas(
    hold: Hold, make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was used stays used."""
    monkeypatch.setattr("otel_limits.settings.policy.file.LOOK_INTERVAL_SECONDS", 0.0)
    hold({"calls": {"model_calls": 1, "window": "day"}})
    agent = make_agent(ScriptedModel(endless(says("done"))))
    assert [agent("go").stop_reason for _ in range(2)] == ["end_turn", "quota_exceeded"]
    hold({"calls": {"model_calls": 2, "window": "day"}})
    assert [agent("go").stop_reason for _ in range(2)] == ["end_turn", "quota_exceeded"]


# --- tokens, money, invocations -------------------------------------------------------------------


def test_tokens_are_reserved_at_their_worst_case_and_settled_at_what_they_were(
    hold: Hold, make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """Projected input and output cap before the call; what the provider reported after it."""
    hold({"tokens": {"tokens": 100_000, "window": "day"}}, observers=[events.append])
    make_agent(capped([says("done")], cap=1000), tools=[])("go")
    before, after = (fact for fact in events if isinstance(fact, QuotaUse))
    (decision,) = (fact for fact in events if isinstance(fact, QuotaDecision))
    assert before.used == 0
    assert before.reserved == decision.wanted
    assert 1000 < before.reserved < 1100
    assert (after.used, after.reserved, after.limit) == (15, 0, 100_000)


def test_a_call_whose_worst_case_does_not_fit_stays_where_it_is(
    hold: Hold, make_agent: MakeAgent
) -> None:
    """Overshoot is 0 where output caps are known."""
    hold({"tokens": {"tokens": 1000, "window": "day"}})
    model = capped([says("never")], cap=1000)
    assert make_agent(model)("go").stop_reason == "quota_exceeded"
    assert model.calls == 0


def test_a_model_without_a_cap_is_estimated_by_what_it_did(
    hold: Hold, make_agent: MakeAgent, events: list[Event]
) -> None:
    """4096 output tokens at first; after 20 calls the highest of them."""
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
def test_the_output_cap_is_found_where_providers_have_it(
    hold: Hold, make_agent: MakeAgent, events: list[Event], config: dict[str, Any]
) -> None:
    """Bedrock and Anthropic on top, OpenAI and Gemini among their parameters."""
    hold({"tokens": {"tokens": 10**6, "window": "day"}}, observers=[events.append])
    model = ScriptedModel([says("done")])
    model.update_config(**config)
    make_agent(model, tools=[])("go")
    (decision,) = (fact for fact in events if isinstance(fact, QuotaDecision))
    assert 7 < int(decision.wanted) < 107


def test_input_that_was_projected_too_low_is_projected_higher(
    hold: Hold, make_agent: MakeAgent, events: list[Event]
) -> None:
    """By as many tokens as the worst of the last projections was short of."""
    hold({"tokens": {"tokens": 10**6, "window": "day"}}, observers=[events.append])
    usage = {"inputTokens": 5000, "outputTokens": 5, "totalTokens": 5005}
    agent = make_agent(capped(endless(says("done", usage=usage))), tools=[])
    began = time.monotonic()
    for _ in range(2):
        agent.messages.clear()
        agent("go")
    first, second = (int(fact.wanted) for fact in events if isinstance(fact, QuotaDecision))
    assert first < 1000
    # What was learned fades from then on: by 6 tokens in a second.
    left = 2 ** ((began - time.monotonic()) / HALF_LIFE_SECONDS)
    assert math.floor(5005 * left) <= second <= 5005


def test_money_is_counted_by_the_price_of_each_call(
    hold: Hold, make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """To the last part of a cent."""
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
def test_a_call_of_unknown_price_does_what_the_policy_says(
    hold: Hold,
    make_agent: MakeAgent,
    events: list[Event],
    unpriced: str,
    reason: str,
    calls: int,
) -> None:
    """It is let go and said to be unpriced, or refused; it is never counted as free."""
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
    told = None if stop is None or stop.quota is None else (stop.quota.quota, stop.quota.limit)
    assert told == (None if calls else ("money", 5))


def test_an_invocation_is_counted_once_whatever_it_calls(
    hold: Hold, make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """With its first model call; one that asks no model is none."""
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
    """One that lacks keeps the others as they were."""
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
    """Baggage says which one it is; those that say nothing share one."""
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


def test_a_parent_bounds_the_sum_over_all_keys(hold: Hold, make_agent: MakeAgent) -> None:
    """Making up new tenants gains nothing beyond it."""
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
    """The agent carries it, whoever calls it."""
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


def test_no_secret_of_a_key_is_told(
    hold: Hold, make_agent: MakeAgent, events: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    """What came from outside is in no fact, message or log."""
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
    """Whether the quota says so or the agent's policy."""
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


def test_observe_lets_everything_go_and_says_what_would_have_been_refused(
    hold: Hold, make_agent: MakeAgent, events: list[Event]
) -> None:
    """It is counted all the same."""
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
    """Nor the other way round."""
    hold(
        {
            "watched": {"model_calls": 1, "window": "day", "action": "observe"},
            "held": {"model_calls": 2, "window": "day"},
        }
    )
    model = ScriptedModel(endless(uses("search")))
    assert make_agent(model)("go").stop_reason == "quota_exceeded"
    assert model.calls == 2


def test_wrap_up_lets_one_last_answer_go_and_counts_it(
    hold: Hold, make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """The model is told why, has no tools, and its words are the result."""
    quota = {"model_calls": 2, "window": "day", "action": "wrap_up"}
    hold({"calls": quota}, observers=[events.append])
    model = ScriptedModel([uses("search"), uses("search"), says("summary")])
    result = make_agent(model)("go")
    assert (result.stop_reason, str(result).split("\n")[0]) == ("quota_exceeded", "summary")
    assert not otel_limits.is_synthetic(result.message)
    assert model.tool_specs[-1] in ([], None)
    assert "permits 2 model calls" in str(model.requests[-1][-1])
    assert last_use(events, "calls") == (3, 0)


def test_a_last_answer_to_a_limit_is_held_by_quotas(hold: Hold, make_agent: MakeAgent) -> None:
    """What may not go out does not go out, also where the limit would have let it."""
    hold(
        {"calls": {"model_calls": 1, "window": "day", "action": "halt"}},
        defaults={"limits": {"max_turns": 1}, "action": "wrap_up"},
    )
    model = ScriptedModel(endless(uses("search")))
    assert make_agent(model)("go").stop_reason == "quota_exceeded"
    assert model.calls == 1


def test_a_limit_and_a_quota_may_share_the_last_answer(hold: Hold, make_agent: MakeAgent) -> None:
    """There is one, and the limit is the reason."""
    hold(
        {"calls": {"model_calls": 1, "window": "day"}},
        defaults={"limits": {"max_turns": 1}, "action": "wrap_up"},
    )
    model = ScriptedModel([uses("search"), says("summary")])
    result = make_agent(model)("go")
    assert (result.stop_reason, str(result).split("\n")[0]) == ("max_turns", "summary")


def test_nobody_is_asked_about_a_quota(hold: Hold, make_agent: MakeAgent) -> None:
    """Where the policy asks a human about limits, a quota halts."""
    hold({"calls": {"model_calls": 1, "window": "day"}}, defaults={"action": "ask"})
    result = make_agent(ScriptedModel(endless(uses("search"))))("go")
    assert result.stop_reason == "quota_exceeded"


# --- how calls end --------------------------------------------------------------------------------


def test_a_failed_call_gives_back_what_was_reserved(
    hold: Hold, make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """It counts as a call, and its tokens as what the ledger says: none."""
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
    """Each asks, and each is counted."""
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
    """Threads that take turns after a few steps, so that what can go wrong between them does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_threads_that_ask_models_at_once_lose_no_call(hold: Hold, events: list[Event]) -> None:
    """What a tool asks in threads of its own counts in full."""
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
    """A refused leg is not resumed once more."""
    hold({"calls": {"model_calls": 2, "window": "day"}})
    model = ScriptedModel(endless(says("done")))
    agent = make_agent(model)
    agent.hooks.add_callback(
        AfterInvocationEvent, lambda event: setattr(event, "resume", "once more")
    )
    assert agent("go").stop_reason == "quota_exceeded"
    assert model.calls == 2


def test_a_stream_that_is_left_is_settled_at_its_input_at_least(
    hold: Hold, make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """Leaving does not lead around a quota, and nothing stays reserved."""
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


def test_a_call_that_a_hook_answers_gives_back_everything(
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


def test_an_agent_as_a_tool_debits_each_call_once(
    hold: Hold, make_agent: MakeAgent, source: str, events: list[Event]
) -> None:
    """Parent and child are two invocations of one fleet."""
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
        """Ask the child."""
        return str(child(question))

    parent = make_agent(
        ScriptedModel([uses("ask_child"), says("done")]), name="parent", tools=[ask_child]
    )
    parent("go")
    assert last_use(events, "calls") == (4, 0)
    assert last_use(events, "runs") == (2, 0)
    assert last_use(events, "tokens") == (60, 0)


class Reporting(ScriptedModel):
    """Asks itself for structured output, as providers' models do."""

    async def structured_output(self, output_model: Any, prompt: Any, *_: Any, **__: Any) -> Any:
        """Stream an answer and make the output of it."""
        async for event in self.stream(prompt):
            yield event
        yield {"output": output_model()}


class Verdict(BaseModel):
    """A structured output."""

    verdict: str = "fine"


def test_a_direct_request_counts_though_it_cannot_ask(
    hold: Hold, make_agent: MakeAgent, events: list[Event]
) -> None:
    """It passes no hook where it could wait, so that it is the next call that is refused."""
    hold({"calls": {"model_calls": 1, "window": "day"}}, observers=[events.append])
    agent = make_agent(Reporting([says("fine"), says("never")]))
    with pytest.warns(DeprecationWarning, match="structured_output"):
        agent.structured_output(Verdict, "go")
    assert agent("go").stop_reason == "quota_exceeded"


def test_quotas_use_exactly_what_the_facts_say(
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
