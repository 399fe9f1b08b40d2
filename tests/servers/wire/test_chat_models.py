"""Bills against our counts, and what vendors receive, through LangChain's model classes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelFallbackMiddleware
from langgraph.checkpoint.memory import InMemorySaver
from openai import RateLimitError

from otel_limits import Halt, Limits, ModelCall, Stop, enable, stop_of
from tests.processes import PATIENCE_SECONDS
from tests.servers.wire.test_strict_histories import RULES
from tests.wire.cases import ASKED, CACHED, HALF, PLAIN, PROMPT, THOUGHT, WRITTEN, WRITTEN_1H
from tests.wire.chat_models import CLIENTS, reply
from tests.wire.formats import Answer
from tests.wire.providers import BY_NAME
from tests.wire.server import Reply
from tests.wire.usages import PRICES, Bill

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from otel_limits import Event
    from tests.wire.server import Vendor

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the vendors' clients

CONFIG: Any = {"recursion_limit": 60, "configurable": {"thread_id": "1"}}
ASK: Any = {"messages": [("user", PROMPT)]}
SAYS = Answer(parts=("Done.",))

each_client = pytest.mark.parametrize("client", CLIENTS)


def search() -> str:
    """Find nothing."""
    return ""


def graph(client: str, vendor: Vendor, *tools: Any, **settings: Any) -> Any:
    """An agent with a model of a class."""
    model = CLIENTS[client].make(vendor.url, **settings)
    return create_agent(model, [*tools], name="boss", checkpointer=InMemorySaver())


def answer(client: str, bill: Bill | None) -> Answer:
    """An answer with its bill, in the vendor's format."""
    provider = BY_NAME[CLIENTS[client].wire]
    return Answer(usages=() if bill is None else (provider.usage(bill),))


async def read(graph: Any) -> None:
    """Stream the answer."""
    async for _ in graph.astream(ASK, CONFIG, stream_mode="messages"):
        pass


WAYS: dict[str, tuple[bool, Callable[[Any, Any], object]]] = {
    "invoke": (False, lambda graph, _: graph.invoke(ASK, CONFIG)),
    "ainvoke": (False, lambda graph, loop: loop.run_until_complete(graph.ainvoke(ASK, CONFIG))),
    "stream": (True, lambda graph, _: list(graph.stream(ASK, CONFIG, stream_mode="messages"))),
    "astream": (True, lambda graph, loop: loop.run_until_complete(read(graph))),
}
"""Whether the vendor streams, and how to call."""


def counted(events: list[Event]) -> ModelCall:
    """The only call."""
    (call,) = (event for event in events if isinstance(event, ModelCall))
    return call


def parts(usage: Any, bill: Bill) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Counted and billed tokens."""
    return (
        (usage.input, usage.output, usage.cache_read, usage.cache_write),
        (bill.input, bill.output, bill.read, bill.write),
    )


# --- bills ----------------------------------------------------------------------------------------

BILLS = {"plain": PLAIN, "cached": CACHED, "written": WRITTEN, "thought": THOUGHT}


@pytest.mark.parametrize("way", WAYS)
@each_client
def test_counts_equal_the_bill(
    client: str,
    way: str,
    vendor: Vendor,
    loop: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens, cached ones, and the money at the price of the model's own name."""
    is_streamed, call = WAYS[way]
    name = CLIENTS[client].model
    prices = {kind: float(amount) for kind, amount in PRICES.items()}
    policy = tmp_path / "policy.yaml"
    policy.write_text(json.dumps({"models": {name: {"price": prices}}}), encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    events: list[Event] = []
    enable(Limits(max_turns=9), observers=[events.append])
    for title, bill in BILLS.items():
        if bill.write and not BY_NAME[CLIENTS[client].wire].has_cache_write:
            continue
        vendor.replies[:] = [reply(client, answer(client, bill), is_streamed=is_streamed)]
        events.clear()
        call(graph(client, vendor), loop)
        found = counted(events)
        told, billed = parts(found.usage, bill)
        assert (title, found.kind, *told) == (title, "measured", *billed)
        assert found.model == name
        assert (found.price, found.provider) == (bill.cost, CLIENTS[client].provider), title


@pytest.mark.parametrize("way", ["invoke", "astream"])
@pytest.mark.parametrize(
    "client", ["ChatOpenAI", "ChatOpenAI, Responses", "ChatGoogleGenerativeAI"]
)
def test_answer_without_usage_is_estimated(
    client: str, way: str, vendor: Vendor, loop: Any, events: list[Event]
) -> None:
    """Never 0."""
    is_streamed, call = WAYS[way]
    enable(Limits(max_turns=9), observers=[events.append])
    vendor.replies[:] = [reply(client, answer(client, None), is_streamed=is_streamed)]
    call(graph(client, vendor), loop)
    check_estimate(counted(events), ASKED)


def check_estimate(call: ModelCall, bill: Bill, *, is_reported: bool = False) -> None:
    """An estimate is between half and twice the tokens that the vendor must have counted."""
    assert call.estimated is not is_reported
    assert bill.input / 2 <= call.usage.input <= bill.input * 2
    assert bill.output / 2 <= call.usage.output <= bill.output * 2


def test_stream_with_half_of_its_usage_is_estimated(vendor: Vendor, events: list[Event]) -> None:
    """LangChain reads Anthropic's input at the end, where older servers do not repeat it."""
    enable(Limits(max_turns=9), observers=[events.append])
    vendor.replies[:] = [BY_NAME["Anthropic"].stream_reply(answer("ChatAnthropic", ASKED))]
    WAYS["stream"][1](graph("ChatAnthropic", vendor), None)
    check_estimate(counted(events), ASKED)


def test_hour_of_a_cache_is_priced_as_requested(vendor: Vendor, events: list[Event]) -> None:
    """The stream does not say for how long the cache was written."""
    enable(Limits(max_turns=9), observers=[events.append])
    vendor.replies[:] = [
        reply("ChatAnthropic", answer("ChatAnthropic", WRITTEN_1H), is_streamed=True)
    ]
    control = {"type": "ephemeral", "ttl": "1h"}
    asked = [{"type": "text", "text": PROMPT, "cache_control": control}]
    made = graph("ChatAnthropic", vendor)
    list(made.stream({"messages": [("user", asked)]}, CONFIG, stream_mode="messages"))
    assert counted(events).usage.cache_write_1h == WRITTEN_1H.write_1h


def test_tier_of_openai_keeps_cache_and_reasoning(vendor: Vendor, events: list[Event]) -> None:
    """LangChain names them after the tier."""
    enable(Limits(max_turns=9), observers=[events.append])
    whole = json.loads(
        reply("ChatOpenAI", answer("ChatOpenAI", CACHED), is_streamed=False).chunks[0]
    )
    body = json.dumps({**whole, "service_tier": "priority"}).encode()
    vendor.replies[:] = [Reply([body], "application/json")]
    graph("ChatOpenAI", vendor).invoke(ASK, CONFIG)
    call = counted(events)
    assert (call.usage.cache_read, call.tier) == (CACHED.read, "priority")


# --- errors ---------------------------------------------------------------------------------------

ERROR = b'{"error": {"message": "no", "type": "error", "code": %d, "status": "NO"}}'


@pytest.mark.parametrize("way", WAYS)
@each_client
def test_refusals_and_cut_answers_are_counted_as_billed(
    client: str, way: str, vendor: Vendor, loop: Any, events: list[Event]
) -> None:
    """A refusal is free; of a stream that is cut, what was read is billed."""
    is_streamed, call = WAYS[way]
    enable(Limits(max_turns=9), observers=[events.append])
    for status in (400, 429, 500, 503):
        vendor.replies[:] = [Reply([ERROR % status], "application/json", status)]
        events.clear()
        with pytest.raises(Exception):  # noqa: B017, PT011  each client has its own
            call(graph(client, vendor), loop)
        refused = counted(events)
        assert (refused.kind, refused.usage.total) == ("failed", 0), status
        assert [event.reason for event in events if isinstance(event, Stop)] == ["error"]
    if is_streamed:
        vendor.replies[:] = [BY_NAME[CLIENTS[client].wire].breaks_off(ASKED)]
        events.clear()
        with pytest.raises(Exception):  # noqa: B017, PT011
            call(graph(client, vendor), loop)
        cut = counted(events)
        assert cut.kind == "failed"
        # Google reports usage with each part.
        check_estimate(cut, HALF, is_reported=client == "ChatGoogleGenerativeAI")


@pytest.mark.parametrize("way", ["invoke", "astream"])
def test_timeout_of_the_client_is_counted(
    way: str, vendor: Vendor, loop: Any, events: list[Event]
) -> None:
    """The vendor may be writing the answer, and bills it."""
    enable(Limits(max_turns=9), observers=[events.append])
    vendor.replies[:] = [Reply([], hangs=True)]
    with pytest.raises(Exception) as caught:  # noqa: PT011  with and without a text
        WAYS[way][1](
            graph("ChatOpenAI", vendor, timeout=httpx.Timeout(PATIENCE_SECONDS, read=0.3)), loop
        )
    assert "Timeout" in type(caught.value).__name__
    call = counted(events)
    assert (call.kind, call.estimated) == ("failed", True)
    assert call.usage.input > ASKED.input / 2


# --- vendors' spent budgets -----------------------------------------------------------------------

SPENT = Reply(
    [b'{"error": {"message": "No.", "type": "insufficient_quota", "code": "insufficient_quota"}}'],
    "application/json",
    429,
)
OVERLOADED = Reply([ERROR % 429], "application/json", 429)


def outcomes(events: list[Event]) -> tuple[list[str], list[str]]:
    """The actions of all halts, and all stop reasons."""
    return (
        [event.action for event in events if isinstance(event, Halt)],
        [event.reason for event in events if isinstance(event, Stop)],
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("action", ["halt", "wrap_up"])
def test_spent_budget_of_the_vendor_halts(
    action: Any, way: str, vendor: Vendor, loop: Any, events: list[Event]
) -> None:
    """Where a limit may halt, and the thread can go on with another budget."""
    is_streamed, call = WAYS[way]
    enable(Limits(max_turns=9), action=action, observers=[events.append])
    vendor.replies[:] = [SPENT]
    made = graph("ChatOpenAI", vendor, search)
    call(made, loop)
    state = made.get_state(CONFIG)
    stop = stop_of(state.values)
    assert stop is not None
    assert (stop.reason, state.next) == ("quota_exceeded", ())
    assert outcomes(events) == (["halted"], ["quota_exceeded"])
    vendor.replies[:] = [reply("ChatOpenAI", SAYS, is_streamed=is_streamed)]
    call(made, loop)
    assert made.get_state(CONFIG).values["messages"][-1].text == "Done."
    assert list(RULES["OpenAI Chat"](json.loads(vendor.requests[-1]))) == []


@pytest.mark.parametrize(
    ("action", "limits", "expected"),
    [
        ("observe", Limits(max_turns=9), (["observed"], ["error"])),
        ("raise", Limits(max_turns=9), (["raised"], ["quota_exceeded"])),
        ("halt", Limits(), ([], ["error"])),
    ],
)
def test_application_gets_the_vendors_error(
    action: Any, limits: Limits, expected: Any, vendor: Vendor, events: list[Event]
) -> None:
    """With `observe` and `raise`, and without a limit; `raise` adds the stop."""
    enable(limits, action=action, observers=[events.append])
    vendor.replies[:] = [SPENT]
    with pytest.raises(RateLimitError) as caught:
        graph("ChatOpenAI", vendor).invoke(ASK, CONFIG)
    assert (stop_of(caught.value) is not None) == (action == "raise")
    assert outcomes(events) == expected


def test_fallback_sees_the_spent_budget_first(vendor: Vendor, events: list[Event]) -> None:
    """A refusal from which the application recovers is no stop."""
    enable(Limits(max_turns=9), observers=[events.append])
    vendor.replies[:] = [SPENT, reply("ChatOpenAI", SAYS, is_streamed=False)]
    model = CLIENTS["ChatOpenAI"].make(vendor.url)
    made = create_agent(model, [], middleware=[ModelFallbackMiddleware(model)])
    assert made.invoke(ASK, CONFIG)["messages"][-1].text == "Done."
    assert outcomes(events) == ([], ["end_turn"])


def test_passing_rate_limit_is_raised(vendor: Vendor, events: list[Event]) -> None:
    """It is no spent budget."""
    enable(Limits(max_turns=9), observers=[events.append])
    vendor.replies[:] = [OVERLOADED]
    with pytest.raises(RateLimitError):
        graph("ChatOpenAI", vendor).invoke(ASK, CONFIG)
    assert outcomes(events) == ([], ["error"])
