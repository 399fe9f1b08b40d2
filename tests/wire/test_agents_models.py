"""Bills against our counts, and what vendors receive, through the OpenAI Agents SDK's classes."""

from __future__ import annotations

import asyncio
import gc
import json
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from agents import Agent, ModelSettings, RunConfig, Runner, SQLiteSession, function_tool
from openai import RateLimitError

from otel_limits import Halt, LimitReachedError, Limits, ModelCall, Stop, enable, stop_of
from tests.wire.agents_models import AGENTS_CLIENTS, close_clients, reply
from tests.wire.cases import ASKED, CACHED, HALF, PLAIN, PROMPT, THOUGHT, WRITTEN
from tests.wire.formats import Answer
from tests.wire.providers import BY_NAME
from tests.wire.server import Reply
from tests.wire.test_chat_models import check_estimate, counted, parts
from tests.wire.test_strict_histories import RULES
from tests.wire.usages import PRICES, Bill

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from otel_limits import Event
    from tests.wire.server import Vendor

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the vendors' clients

CONFIG = RunConfig(tracing_disabled=True)
ASKS = Answer(tool=("search", "{}"), parts=("Let me look.",))
ASKS_SILENTLY = Answer(tool=("search", "{}"), parts=())
SAYS = Answer(parts=("Done.",))

each_client = pytest.mark.parametrize("client", AGENTS_CLIENTS)
each_way = pytest.mark.parametrize("is_streamed", [False, True], ids=["run", "run_streamed"])


LOOPS: list[asyncio.AbstractEventLoop] = []


@pytest.fixture(scope="module", autouse=True)
def loop() -> Iterator[None]:
    """One event loop, as a client's connections belong to it."""
    LOOPS.append(asyncio.new_event_loop())
    yield
    loop = LOOPS.pop()
    loop.run_until_complete(close_clients())
    loop.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # LiteLLM keeps connections that nothing can close
        gc.collect()


@function_tool
def search() -> str:
    """Find nothing."""
    return ""


def agent(client: str, vendor: Vendor, *tools: Any, **settings: Any) -> Agent[Any]:
    """An agent with a model of a class."""
    model = AGENTS_CLIENTS[client].make(vendor.url, **settings)
    reporting = ModelSettings(include_usage=True)  # else LiteLLM's streams contain no usage
    return Agent("boss", model=model, tools=[*tools], model_settings=reporting)


def call(agent: Any, text: str = PROMPT, *, is_streamed: bool = False, **options: Any) -> Any:
    """Run an agent."""

    async def run() -> Any:
        if not is_streamed:
            return await Runner.run(agent, text, run_config=CONFIG, **options)
        result = Runner.run_streamed(agent, text, run_config=CONFIG, **options)
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
        call(agent(client, vendor, timeout=0.3))
    assert "Timeout" in type(caught.value).__name__
    found = counted(events)
    assert (found.kind, found.estimated) == ("failed", True)
    assert found.usage.input > ASKED.input / 2


# --- what vendors receive -------------------------------------------------------------------------

CASES: dict[str, tuple[Limits, tuple[Answer, ...], Any]] = {
    "after tools": (Limits(max_turns=1), (ASKS, SAYS), "halt"),
    "after silent tools": (Limits(max_turns=1), (ASKS_SILENTLY, SAYS), "halt"),
    "refused tool": (Limits(max_tool_calls=1), (ASKS, ASKS, SAYS), "halt"),
    "last answer": (Limits(max_turns=2), (ASKS, ASKS_SILENTLY, SAYS, SAYS), "wrap_up"),
    "blank last answer": (Limits(max_turns=1), (ASKS, Answer(parts=(" ",)), SAYS), "wrap_up"),
    "last answer with a tool": (Limits(max_turns=1), (ASKS, ASKS, SAYS), "wrap_up"),
    "raised": (Limits(max_turns=1), (ASKS, SAYS), "raise"),
}
HALTED = [
    *((client, False) for client in AGENTS_CLIENTS),
    *(("Responses", True), ("Chat Completions", True)),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("client", "is_streamed"), HALTED)
def test_requests_of_a_halted_session_are_valid(
    client: str,
    case: str,
    is_streamed: bool,  # noqa: FBT001  a parameter of pytest
    vendor: Vendor,
) -> None:
    """Also those of its last answer and of the next run; and our mark is in none of them."""
    limits, answers, action = CASES[case]
    enable(limits, action=action)
    usage = (BY_NAME[AGENTS_CLIENTS[client].wire].usage(PLAIN),)
    vendor.replies[:] = [
        reply(
            client,
            Answer(usages=usage, parts=each.parts, tool=each.tool),
            is_streamed=is_streamed,
        )
        for each in answers
    ]
    for number, each in enumerate(vendor.replies):  # the SDK refuses an ID that it has seen
        marks = [(b'"%s1"' % name, b'"%s1-%d"' % (name, number)) for name in (b"t", b"r", b"i")]
        for old, new in marks:
            each.chunks = [chunk.replace(old, new) for chunk in each.chunks]
    made = agent(client, vendor, search)
    session = SQLiteSession("1")
    for text in ("go", "again"):
        try:
            result = call(made, text, is_streamed=is_streamed, session=session)
        except LimitReachedError as error:
            result = error
        assert text == "again" or stop_of(result) is not None
    session.close()
    assert len(vendor.requests) == len(answers)
    assert b"otel_limits" not in b"".join(vendor.requests)
    rules = RULES[AGENTS_CLIENTS[client].wire]
    faults = [fault for body in vendor.requests for fault in rules(json.loads(body))]
    assert faults == [], json.dumps([json.loads(each) for each in vendor.requests], indent=1)


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
