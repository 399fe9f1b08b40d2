"""Bills against our counts, through the OpenAI Agents SDK's model classes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest
from agents import Agent, ModelSettings, RunConfig, Runner
from openai import RateLimitError

from otel_limits import Halt, Limits, ModelCall, Stop, enable, stop_of
from tests.processes import PATIENCE_SECONDS
from tests.servers.wire.test_chat_models import check_estimate, counted, parts
from tests.wire.agents_models import AGENTS_CLIENTS, reply
from tests.wire.cases import ASKED, CACHED, HALF, PLAIN, PROMPT, THOUGHT, WRITTEN
from tests.wire.formats import Answer
from tests.wire.providers import BY_NAME
from tests.wire.server import Reply
from tests.wire.usages import PRICES, Bill

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from otel_limits import Event
    from tests.wire.server import Vendor

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the vendors' clients

CONFIG = RunConfig(tracing_disabled=True)

each_client = pytest.mark.parametrize("client", AGENTS_CLIENTS)
each_way = pytest.mark.parametrize("is_streamed", [False, True], ids=["run", "run_streamed"])


LOOPS: list[asyncio.AbstractEventLoop] = []


@pytest.fixture(scope="module", autouse=True)
def current_loop(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """One event loop, as a client's connections belong to it."""
    LOOPS.append(loop)
    yield
    LOOPS.pop()


def agent(client: str, vendor: Vendor, **settings: Any) -> Agent[Any]:
    """An agent with a model of a class."""
    model = AGENTS_CLIENTS[client].make(vendor.url, **settings)
    reporting = ModelSettings(include_usage=True)  # else LiteLLM's streams contain no usage
    return Agent("boss", model=model, model_settings=reporting)


def call(agent: Any, *, is_streamed: bool = False) -> Any:
    """Run an agent."""

    async def run() -> Any:
        if not is_streamed:
            return await Runner.run(agent, PROMPT, run_config=CONFIG)
        result = Runner.run_streamed(agent, PROMPT, run_config=CONFIG)
        async for _ in result.stream_events():
            pass
        return result

    return LOOPS[-1].run_until_complete(run())


def answer(client: str, bill: Bill | None) -> Answer:
    """An answer with its bill, in the vendor's format."""
    provider = BY_NAME[AGENTS_CLIENTS[client].wire]
    return Answer(usages=() if bill is None else (provider.usage(bill),))


# --- bills ----------------------------------------------------------------------------------------

BILLS = {"plain": PLAIN, "cached": CACHED, "written": WRITTEN, "thought": THOUGHT}


@each_way
@each_client
def test_counts_equal_the_bill(
    client: str,
    is_streamed: bool,  # noqa: FBT001  a parameter of pytest
    vendor: Vendor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens, cached ones, and the money at the price of the model's own name."""
    known = AGENTS_CLIENTS[client]
    prices = {kind: float(amount) for kind, amount in PRICES.items()}
    policy = tmp_path / "policy.yaml"
    policy.write_text(json.dumps({"models": {known.model: {"price": prices}}}), encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    events: list[Event] = []
    enable(Limits(max_turns=9), observers=[events.append])
    for title, bill in BILLS.items():
        if bill.write and not BY_NAME[known.wire].has_cache_write:
            continue
        vendor.replies[:] = [reply(client, answer(client, bill), is_streamed=is_streamed)]
        events.clear()
        call(agent(client, vendor), is_streamed=is_streamed)
        found = counted(events)
        told, billed = parts(found.usage, bill)
        assert (title, found.kind, *told) == (title, "measured", *billed)
        assert found.model == known.model
        assert (found.price, found.provider) == (bill.cost, known.provider), title


@each_way
@pytest.mark.parametrize("client", ["Responses", "Chat Completions"])
def test_answer_without_usage_is_estimated(
    client: str,
    is_streamed: bool,  # noqa: FBT001  a parameter of pytest
    vendor: Vendor,
    events: list[Event],
) -> None:
    """Never 0."""
    enable(Limits(max_turns=9), observers=[events.append])
    vendor.replies[:] = [reply(client, answer(client, None), is_streamed=is_streamed)]
    call(agent(client, vendor), is_streamed=is_streamed)
    check_estimate(counted(events), ASKED)


EMPTY: Final[Mapping[str, list[str]]] = {
    "Responses": ["zero_token", "estimated"],
    "Chat Completions": ["zero_token", "estimated"],
    # It makes up zeros itself, and the SDK does not keep what the vendor sent.
    "LiteLLM": ["estimated"],
}
"""The kinds of empty answers: with a usage of zeros, and without a usage."""


@each_way
@pytest.mark.parametrize("client", EMPTY)
def test_empty_answer_of_zero_tokens_differs_from_one_without_usage(
    client: str,
    is_streamed: bool,  # noqa: FBT001  a parameter of pytest
    vendor: Vendor,
    events: list[Event],
) -> None:
    """The SDK's own usage is the same for both."""
    enable(Limits(max_turns=9), observers=[events.append])
    for bill, kind in zip((Bill(), None), EMPTY[client], strict=False):
        empty = replace(answer(client, bill), parts=("",))
        vendor.replies[:] = [reply(client, empty, is_streamed=is_streamed)]
        events.clear()
        call(agent(client, vendor), is_streamed=is_streamed)
        assert (bill, counted(events).kind) == (bill, kind)


# --- errors ---------------------------------------------------------------------------------------

ERROR = b'{"error": {"message": "no", "type": "error", "code": %d, "status": "NO"}}'


@each_way
@each_client
def test_refusals_and_cut_answers_are_counted_as_billed(
    client: str,
    is_streamed: bool,  # noqa: FBT001  a parameter of pytest
    vendor: Vendor,
    events: list[Event],
) -> None:
    """A refusal is free; of a stream that is cut, what was read is billed."""
    enable(Limits(max_turns=9), observers=[events.append])
    for status in (400, 503):
        vendor.replies[:] = [Reply([ERROR % status], "application/json", status)]
        events.clear()
        with pytest.raises(Exception):  # noqa: B017, PT011  each client has its own
            call(agent(client, vendor), is_streamed=is_streamed)
        refused = counted(events)
        assert (refused.kind, refused.usage.total) == ("failed", 0), status
        assert [event.reason for event in events if isinstance(event, Stop)] == ["error"]
    if is_streamed:
        vendor.replies[:] = [BY_NAME[AGENTS_CLIENTS[client].wire].breaks_off(ASKED)]
        events.clear()
        with pytest.raises(Exception):  # noqa: B017, PT011
            call(agent(client, vendor), is_streamed=True)
        cut = counted(events)
        assert cut.kind == "failed"
        check_estimate(cut, HALF)


@pytest.mark.parametrize("client", ["Responses", "Chat Completions"])
def test_timeout_of_the_client_is_counted(client: str, vendor: Vendor, events: list[Event]) -> None:
    """The vendor may be writing the answer, and bills it."""
    enable(Limits(max_turns=9), observers=[events.append])
    vendor.replies[:] = [Reply([], hangs=True)]
    with pytest.raises(Exception) as caught:  # noqa: PT011  with and without a text
        call(agent(client, vendor, timeout=httpx.Timeout(PATIENCE_SECONDS, read=0.3)))
    assert "Timeout" in type(caught.value).__name__
    found = counted(events)
    assert (found.kind, found.estimated) == ("failed", True)
    assert found.usage.input > ASKED.input / 2


# --- vendors' spent budgets -----------------------------------------------------------------------

SPENT = Reply(
    [b'{"error": {"message": "No.", "type": "insufficient_quota", "code": "insufficient_quota"}}'],
    "application/json",
    429,
)


@each_way
@pytest.mark.parametrize(
    ("action", "actions", "reason"),
    [
        ("halt", ["raised"], "quota_exceeded"),
        ("raise", ["raised"], "quota_exceeded"),
        ("observe", ["observed"], "error"),
    ],
)
def test_spent_budget_of_the_vendor_is_a_stop(
    action: Any,
    actions: list[str],
    reason: str,
    is_streamed: bool,  # noqa: FBT001  a parameter of pytest
    vendor: Vendor,
    events: list[Event],
) -> None:
    """The application gets the vendor's error, which has the stop."""
    enable(Limits(max_turns=9), action=action, observers=[events.append])
    vendor.replies[:] = [SPENT]
    with pytest.raises(RateLimitError) as caught:
        call(agent("Responses", vendor), is_streamed=is_streamed)
    assert (stop_of(caught.value) is not None) == (action != "observe")
    assert [event.action for event in events if isinstance(event, Halt)] == actions
    assert [event.reason for event in events if isinstance(event, Stop)] == [reason]


def test_tier_of_a_streamed_response_is_counted(vendor: Vendor, events: list[Event]) -> None:
    """OpenAI reports which one it has served."""
    enable(Limits(max_turns=9), observers=[events.append])
    streamed = reply("Responses", answer("Responses", PLAIN), is_streamed=True)
    old, new = b'"object": "response"', b'"object": "response", "service_tier": "priority"'
    streamed.chunks = [chunk.replace(old, new) for chunk in streamed.chunks]
    vendor.replies[:] = [streamed]
    call(agent("Responses", vendor), is_streamed=True)
    (found,) = [event for event in events if isinstance(event, ModelCall)]
    assert found.tier == "priority"
