"""Errors by which a vendor reports a spent budget: the application's first, then perhaps a halt."""

from __future__ import annotations

import gc
import json
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from openai import RateLimitError
from strands import Agent, ModelRetryStrategy, tool
from strands.hooks import AfterModelCallEvent
from strands.middleware import InvokeModelStage
from strands.models import ModelRouter
from strands.types.exceptions import ModelThrottledException

import otel_limits
from otel_limits import Event, Halt, Limits, Stop, enable
from otel_limits.bindings.gateways import budget_refusal
from otel_limits.testing import ScriptedModel, endless, says, uses
from tests.wire import models
from tests.wire.formats import Answer
from tests.wire.providers import BY_NAME
from tests.wire.server import Reply, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.wire.server import Vendor


def openai_error(
    code: str, kind: str = "insufficient_quota", message: str = "No."
) -> dict[str, Any]:
    """Make the body of an error of OpenAI, or of a gateway with its API."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def refuse(status: int, body: object) -> Reply:
    """Refuse a request."""
    return Reply([json.dumps(body).encode()], "application/json", status)


SPENT = refuse(429, openai_error("insufficient_quota"))


@pytest.fixture
def vendor() -> Iterator[Vendor]:
    """A vendor whose budget is spent."""
    with serving() as vendor:
        vendor.replies = [SPENT]
        yield vendor


@pytest.fixture(scope="module", autouse=True)
def _sockets_collected() -> Iterator[None]:
    """Collect the sockets that clients leave open, which would warn in a later test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


def calling(model: Any, **arguments: Any) -> Agent:
    """Make an agent."""
    return Agent(model=model, callback_handler=None, name="calls", **arguments)


def outcomes(events: list[Event]) -> tuple[list[str], list[str]]:
    """Return the actions of all halts, and all stop reasons."""
    return (
        [event.action for event in events if isinstance(event, Halt)],
        [event.reason for event in events if isinstance(event, Stop)],
    )


# --- the application sees it first ----------------------------------------------------------------

SWITCHES: dict[str, Limits] = {"without a limit": Limits(), "with a limit": Limits(max_turns=9)}


@pytest.mark.parametrize("limits", SWITCHES.values(), ids=SWITCHES)
@pytest.mark.parametrize("action", ["observe", "halt", "raise"])
def test_router_asks_the_second_vendor(
    vendor: Vendor, limits: Limits, action: Any, events: list[Event], source: str
) -> None:
    """A refusal from which the application recovers is no stop."""
    enable(limits, action=action, observers=[events.append])
    second = ScriptedModel(endless(says("answer")))
    agent = calling(
        ModelRouter([models.openai(vendor.url), second]),
        retry_strategy=ModelRetryStrategy(max_attempts=1),
    )
    assert str(agent("go")) == "answer\n"
    assert (len(vendor.requests), second.calls) == (1, 1)
    assert outcomes(events) == ([], ["end_turn"])


@pytest.mark.parametrize("limits", SWITCHES.values(), ids=SWITCHES)
def test_hook_swaps_the_model(vendor: Vendor, limits: Limits, events: list[Event]) -> None:
    """A hook sees the vendor's error, and the repeated call is the agent's."""
    enable(limits, observers=[events.append])
    second = ScriptedModel(endless(says("answer")))
    seen: list[BaseException | None] = []

    def swap(event: AfterModelCallEvent) -> None:
        if event.exception is not None and not event.retry:
            seen.append(event.exception.__cause__)
            event.agent.model, event.retry = second, True

    agent = calling(models.openai(vendor.url), retry_strategy=ModelRetryStrategy(max_attempts=1))
    agent.hooks.add_callback(AfterModelCallEvent, swap)
    assert str(agent("go")) == "answer\n"
    assert [type(each) for each in seen] == [RateLimitError]
    assert outcomes(events) == ([], ["end_turn"])


def test_error_of_the_second_vendor_is_not_taken_for_the_first(
    vendor: Vendor, events: list[Event]
) -> None:
    """A fallback's own failure is raised while the refusal is being handled."""
    enable(Limits(max_turns=9), observers=[events.append])

    async def fall_back(context: Any, next_fn: Any) -> Any:
        try:
            async for event in next_fn(context):
                yield event
        except ModelThrottledException:
            raise ValueError("the second vendor is misconfigured")  # noqa: B904  as it happens

    agent = calling(models.openai(vendor.url))
    agent.add_middleware(InvokeModelStage, fall_back)
    with pytest.raises(ValueError, match="misconfigured"):
        agent("go")
    assert outcomes(events) == ([], ["error"])


# --- it leaves the loop ---------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["halt", "wrap_up", "ask"])
def test_call_returns_where_a_limit_may_halt(
    vendor: Vendor, action: Any, events: list[Event], source: str
) -> None:
    """Strands' own six attempts would take two minutes: one request is made."""
    enable(Limits(max_turns=9), action=action, observers=[events.append])
    agent = calling(models.openai(vendor.url))
    result = agent("go")
    assert (result.stop_reason, len(vendor.requests)) == ("quota_exceeded", 1)
    assert otel_limits.is_synthetic(result.message)
    stop = otel_limits.stop_of(result)
    assert stop is not None
    assert stop.breach is not None
    assert stop.breach.limit == "gateway_budget"
    assert outcomes(events) == (["halted"], ["quota_exceeded"])
    vendor.replies = [refuse(429, openai_error("rate_limit_exceeded", "requests"))]
    assert len(agent.messages) == 2


def raised_by(agent: Agent) -> ModelThrottledException:
    """Return the application's own exception."""
    with pytest.raises(ModelThrottledException) as caught:
        agent("go")
    assert isinstance(caught.value.__cause__, RateLimitError)
    return caught.value


def test_error_is_raised_without_a_limit(vendor: Vendor, events: list[Event], source: str) -> None:
    """Nothing halts an agent that nothing limits, and its retries stay its own."""
    enable(observers=[events.append])
    strategy = ModelRetryStrategy(max_attempts=3, initial_delay=0, max_delay=0)
    error = raised_by(calling(models.openai(vendor.url), retry_strategy=strategy))
    assert otel_limits.stop_of(error) is None
    assert len(vendor.requests) == 3
    assert outcomes(events) == ([], ["error"])


def test_error_is_raised_by_action_observe(vendor: Vendor, events: list[Event]) -> None:
    """The would-be halt is recorded."""
    enable(Limits(max_turns=9), action="observe", observers=[events.append])
    error = raised_by(calling(models.openai(vendor.url)))
    assert otel_limits.stop_of(error) is None
    assert outcomes(events) == (["observed"], ["error"])


def test_error_raised_by_action_raise_has_the_stop_in_its_notes(
    vendor: Vendor, events: list[Event]
) -> None:
    """The application's `except` clauses keep working, and find why the agent stopped."""
    enable(Limits(max_turns=9), action="raise", observers=[events.append])
    error = raised_by(calling(models.openai(vendor.url)))
    (note,) = error.__notes__
    assert "its budget is spent" in note
    assert note.stop.reason == "quota_exceeded"  # type: ignore[attr-defined]
    assert otel_limits.stop_of(error) == note.stop  # type: ignore[attr-defined]
    assert outcomes(events) == (["raised"], ["quota_exceeded"])


@pytest.mark.parametrize("calls", [0, 1])
def test_model_around_an_agent_that_raised_reads_not_to_repeat_it(
    vendor: Vendor, source: str, calls: int
) -> None:
    """The vendor's error is for the application: a model might take it for a passing failure."""
    enable(Limits(max_turns=9), action="raise")
    own = [BY_NAME["OpenAI Chat"].stream_reply(Answer(tool=("look", "{}"), parts=()))] * calls
    vendor.replies = [*own, SPENT]

    @tool
    def look() -> str:
        """Look."""
        return "nothing"

    child = Agent(
        model=models.openai(vendor.url), tools=[look], name="child", callback_handler=None
    )
    model = ScriptedModel([uses("child", arguments={"input": "go"}), says("done")])
    parent = Agent(model=model, tools=[child.as_tool()], callback_handler=None)
    parent("go")
    assert parent.messages[2]["content"][0]["toolResult"]["content"] == [
        {
            "text": "Agent error: Agent 'child' stopped before it finished: the model vendor's "
            "budget is used up. Do not call it again for this task. Answer with what you have, "
            "and say what is missing."
        }
    ]


@pytest.mark.parametrize("place", ["tree", "quota"])
def test_limit_of_a_tree_or_a_quota_is_in_force(
    place: str, vendor: Vendor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It halts the agent, without retries."""
    if place == "quota":
        policy = tmp_path / "limits.yaml"
        policy.write_text("quotas: {all: {model_calls: 99, window: hour}}\n")
        monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable(tree=Limits(max_turns=9) if place == "tree" else None)
    result = calling(models.openai(vendor.url))("go")
    assert (result.stop_reason, len(vendor.requests)) == ("quota_exceeded", 1)


# --- how it is recognized -------------------------------------------------------------------------

OPENAI_TEXT = "You exceeded your current quota, please check your plan and billing details."
GOOGLE_TEXT = (
    f"{OPENAI_TEXT} For more information on this error, head to: "
    "https://ai.google.dev/gemini-api/docs/rate-limits.\n* Quota exceeded for metric: "
    "generativelanguage.googleapis.com/generate_content_free_tier_requests, limit: 20"
)


def anthropic_error(kind: str, message: str) -> dict[str, Any]:
    """Make the body of an error of Anthropic."""
    return {"type": "error", "error": {"type": kind, "message": message}}


def google_error(quota: str) -> dict[str, Any]:
    """Make the body of an error of Google."""
    violation = {"quotaMetric": "generativelanguage.googleapis.com/x", "quotaId": quota}
    failure = {"@type": "type.googleapis.com/google.rpc.QuotaFailure", "violations": [violation]}
    retry = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "21s"}
    error = {"code": 429, "message": GOOGLE_TEXT, "status": "RESOURCE_EXHAUSTED"}
    return {"error": {**error, "details": [failure, retry]}}


def bedrock_error(window: str) -> dict[str, Any]:
    """Make the body of an error of Amazon Bedrock."""
    message = f"Too many tokens{window}, please wait before trying again."
    return {"__type": "ThrottlingException", "message": message}


Case = tuple["Callable[..., Any]", int, dict[str, Any]]

REFUSALS: dict[str, Case] = {
    "OpenAI": (models.openai, 429, openai_error("insufficient_quota")),
    "OpenAI's project": (models.openai, 429, openai_error("project_spend_limit_exceeded")),
    "OpenAI without a code": (models.openai, 429, openai_error("", "", OPENAI_TEXT)),
    "OpenAI, Responses": (models.openai_responses, 429, openai_error("insufficient_quota")),
    "LiteLLM's proxy": (models.openai, 400, openai_error("400", "budget_exceeded")),
    "Groq": (models.openai, 400, openai_error("blocked_api_access", "")),
    "OpenRouter": (models.openai, 402, {"error": {"message": "No.", "code": 402}}),
    "OpenRouter's key": (
        models.openai,
        403,
        {"error": {"message": "Key limit exceeded (total limit). Manage it", "code": 403}},
    ),
    "xAI": (
        models.openai,
        403,
        {"error": "Your team x has either used all available credits or reached its"},
    ),
    "Anthropic": (models.anthropic, 402, anthropic_error("billing_error", "No.")),
    "Anthropic's credit": (
        models.anthropic,
        400,
        anthropic_error(
            "invalid_request_error",
            "Your credit balance is too low to access the Anthropic API. Please go to",
        ),
    ),
    "Google, per day": (
        models.gemini,
        429,
        google_error("GenerateRequestsPerDayPerProjectPerModel-FreeTier"),
    ),
    "Amazon Bedrock, per day": (models.bedrock, 429, bedrock_error(" per day")),
    "LiteLLM": (models.litellm, 429, openai_error("insufficient_quota", message=OPENAI_TEXT)),
}

OTHERS: dict[str, Case] = {
    "a rate": (models.openai, 429, openai_error("rate_limit_exceeded", "requests")),
    "a text about budgets": (
        models.openai,
        400,
        openai_error("invalid", "invalid_request_error", "messages: the budget was exceeded"),
    ),
    "Anthropic's thinking budget": (
        models.anthropic,
        400,
        anthropic_error("invalid_request_error", "thinking_budget: value exceeds limit"),
    ),
    "OpenAI's thinking budget": (
        models.openai,
        422,
        openai_error("", "", "thinking_budget: value exceeds limit"),
    ),
    "a thinking budget with a rate": (
        models.openai,
        429,
        openai_error("", "", "thinking_budget: value exceeds limit"),
    ),
    "Google, per minute": (
        models.gemini,
        429,
        google_error("GenerateRequestsPerMinutePerProjectPerModel-FreeTier"),
    ),
    "Amazon Bedrock, per minute": (models.bedrock, 429, bedrock_error("")),
    "a broken server": (models.openai, 500, {"error": {"message": "budget exceeded"}}),
}


def error_of(case: Case) -> BaseException:
    """Return the error that a real client makes of a response."""
    make, status, body = case
    with serving() as vendor:
        vendor.replies = [refuse(status, body)]
        agent = calling(make(vendor.url), retry_strategy=ModelRetryStrategy(max_attempts=1))
        with pytest.raises(Exception, match=r".") as caught:
            agent("go")
        assert vendor.requests
    return caught.value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSALS.values(), ids=REFUSALS)
def test_spent_budget_is_recognized(case: Case) -> None:
    """By the vendor's code, or else by one phrase that it documents for the status."""
    verdict = budget_refusal(error_of(case))
    assert verdict is not None
    assert verdict.reason == "quota_exceeded"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_other_error_is_not_a_spent_budget(case: Case) -> None:
    """A rate passes, a wrong request stays wrong, and users write about budgets, too."""
    assert budget_refusal(error_of(case)) is None


def test_code_in_a_text_is_no_evidence() -> None:
    """Only a refusal has a code or a status."""
    assert budget_refusal(OSError("insufficient_quota")) is None
