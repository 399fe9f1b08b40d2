"""Recording of real agents: every model call once, exactly, and none of its text."""

from __future__ import annotations

import asyncio
import contextlib
import decimal
import json
import random
import sys
import threading
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import baggage, context
from strands import Agent, tool

import otel_limits
from otel_limits import Limits, ModelCall, Usage, disable, enable
from otel_limits.cli import main
from otel_limits.core.events import Invocation, Stop
from otel_limits.core.usage import MAX_TOKENS
from otel_limits.ledger.rows import (
    MAX_INTEGER,
    MAX_NAME,
    MOST_TOOLS,
    after_tools_text,
    dollars,
    picodollars,
    signed_picodollars,
    tools_in,
)
from otel_limits.observers.ledger import LedgerObserver
from otel_limits.runs.registry import LIVE
from otel_limits.testing import ScriptedModel, endless, fails, says, tokens, uses
from tests.features.page import SUBJECTS
from tests.langchain.event_loops import NO_CONTEXT
from tests.ledger.fixtures import eventually
from tests.unit.strands.test_sent_requests import asking, read

if TYPE_CHECKING:
    from pathlib import Path

    from otel_limits import Event
    from tests.conftest import MakeAgent
    from tests.ledger.fixtures import LedgerFile


CACHED = {
    "inputTokens": 40,
    "outputTokens": 7,
    "totalTokens": 147,
    "cacheReadInputTokens": 90,
    "cacheWriteInputTokens": 10,
}
"""As Bedrock and Anthropic report it: input excludes cached tokens."""


def test_a_model_call_is_one_row(source: str, ledger: LedgerFile, make_agent: MakeAgent) -> None:
    """Agent, model, session, time and tokens of a call."""
    enable()
    make_agent(ScriptedModel([uses("search"), says("x")]))("go")
    first, second = ledger.calls()
    (invocation,) = ledger.invocations()
    assert (first["agent"], first["model"], first["provider"]) == (
        "tester",
        "scripted",
        "ScriptedModel",
    )
    assert (first["invocation_id"], first["root_id"]) == (invocation["id"], None)
    assert (first["input_tokens"], first["output_tokens"], first["state"]) == (10, 5, "measured")
    assert [(call["number"], call["turn"], call["iteration"]) for call in (first, second)] == [
        (1, 1, 1),
        (2, 2, 2),
    ]
    assert invocation["started_us"] < first["at_us"] < second["at_us"] <= invocation["ended_us"]
    assert 0 < first["duration_us"] <= invocation["ended_us"] - invocation["started_us"]
    assert first["day"] == first["at_us"] // 86_400_000_000


def test_the_ids_of_a_row_are_those_of_the_span(
    ledger: LedgerFile, make_agent: MakeAgent, spans: Any
) -> None:
    """A row leads to its span, and an invocation to that of its agent."""
    enable()
    make_agent(ScriptedModel([says("x")]))("go")
    ids = {
        span.name: (f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}")
        for span in spans.get_finished_spans()
    }
    (call,), (invocation,) = ledger.calls(), ledger.invocations()
    assert (invocation["trace_id"], call["span_id"]) == ids["chat"]
    assert (invocation["trace_id"], invocation["span_id"]) == ids["invoke_agent tester"]


def test_without_spans_there_are_no_ids(
    hooks_only: None, ledger: LedgerFile, make_agent: MakeAgent
) -> None:
    """An invocation without a recorded span is identified by its own ID, and marked unsampled."""
    enable()
    make_agent(ScriptedModel([says("x")]))("go")
    (call,), (invocation,) = ledger.calls(), ledger.invocations()
    assert (call["trace_id"], call["span_id"], invocation["blind"]) == (None, None, 1)


def test_tokens_are_kept_as_counted_and_as_reported(
    source: str, ledger: LedgerFile, make_agent: MakeAgent
) -> None:
    """Cached tokens count as input, and what the provider said stays to be recomputed."""
    enable()
    make_agent(ScriptedModel([says("x", usage=CACHED)]))("go")
    (call,) = ledger.calls()
    assert (call["input_tokens"], call["output_tokens"]) == (140, 7)
    assert (call["cache_read_tokens"], call["cache_write_tokens"]) == (90, 10)
    assert (call["reported_input_tokens"], call["reported_output_tokens"]) == (40, 7)
    assert (call["reported_cache_read_tokens"], call["reported_cache_write_tokens"]) == (90, 10)
    assert call["reported_total_tokens"] == 147


@pytest.mark.parametrize(
    ("answer", "unmeasured", "state", "estimated"),
    [
        (says("x"), "estimate", "measured", 0),
        (says("", usage=dict.fromkeys(tokens(1), 0)), "estimate", "zero", 0),
        (says("x", usage=None), "estimate", "estimated", 1),
        (says("x", usage=None), "ignore", "unmeasured", 0),
        (fails(ConnectionError("gone")), "estimate", "failed", 0),
        (says("x", usage=None, error=ConnectionError("gone")), "estimate", "interrupted", 1),
        (says("x", usage=None, error=ConnectionError("gone")), "ignore", "interrupted", 0),
    ],
    ids=["measured", "zero", "estimated", "unmeasured", "failed", "broken off", "and ignored"],
)
def test_how_much_is_known_of_a_call(  # noqa: PLR0913, PLR0917  fixtures
    source: str,
    ledger: LedgerFile,
    make_agent: MakeAgent,
    monkeypatch: pytest.MonkeyPatch,
    answer: Any,
    unmeasured: str,
    state: str,
    estimated: int,
) -> None:
    """Measured, zero, unmeasured, estimated, failed and interrupted calls are distinguished."""
    monkeypatch.setenv("OTEL_LIMITS_UNMEASURED", unmeasured)
    enable()
    agent = make_agent(ScriptedModel([answer]))
    if answer.error is None:
        agent("go")
    else:
        with pytest.raises(ConnectionError):
            agent("go")
    (call,) = ledger.calls()
    assert (call["state"], call["estimated"]) == (state, estimated)
    assert (call["reported_input_tokens"] is None) == (answer.usage is None)
    counts = call["input_tokens"] + call["output_tokens"]
    assert bool(counts) == (state == "measured" or estimated == 1)


def test_an_invocation_is_one_row(
    source: str, ledger: LedgerFile, make_agent: MakeAgent, events: list[Event]
) -> None:
    """How it ended, which limit did it, and what it used in all."""
    enable(Limits(max_turns=2, max_token_budget=1000), observers=[events.append])
    agent = make_agent(ScriptedModel(endless(uses("search", "search"))))
    agent("go")
    (row,) = ledger.invocations()
    assert (row["agent"], row["reason"], row["action"]) == ("tester", "max_turns", "halted")
    breach = [row[f"breach_{each}"] for each in ("limit", "cap", "observed", "unit")]
    assert breach == ["max_turns", "2", "2", "turns"]
    assert (row["turns"], row["cycles"], row["model_calls"], row["tool_calls"]) == (2, 2, 2, 4)
    assert (row["input_tokens"], row["output_tokens"]) == (20, 10)
    assert row["session_id"] == agent.session_id
    assert json.loads(row["limits"]) == {"max_turns": 2, "max_token_budget": 1000}
    assert (row["source"], row["parent_id"], row["root_id"]) == ("live", None, row["id"])


def test_an_invocation_under_way_is_there_already(
    ledger: LedgerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `call`, its beginning and its calls are durable while it still runs."""
    seen: list[tuple[int, Any]] = []

    @tool
    def look() -> str:
        """Look into the ledger."""
        seen.append((len(ledger.calls()), ledger.invocations()[0]["ended_us"]))
        return "seen"

    monkeypatch.setenv("OTEL_LIMITS_LEDGER_SYNC", "call")
    enable()
    model = ScriptedModel([uses("look"), uses("look"), says("x")])
    Agent(model=model, tools=[look], callback_handler=None)("go")
    assert seen == [(1, None), (2, None)]
    assert ledger.invocations()[0]["reason"] == "end_turn"


def test_a_tool_call_is_one_row(source: str, ledger: LedgerFile) -> None:
    """Name, status, duration and fingerprint, and neither arguments nor result."""

    @tool
    def divide(number: int) -> str:
        """Divide."""
        return str(1 // number)

    enable(Limits(max_identical_tool_calls=9))
    answers = [uses("divide", arguments={"number": n}) for n in (1, 0, 1)]
    Agent(
        model=ScriptedModel([*answers, says("x")]), tools=[divide], callback_handler=None, name="d"
    )("go")
    rows = ledger.tools()
    assert [(row["agent"], row["tool"], row["status"]) for row in rows] == [
        ("d", "divide", "success"),
        ("d", "divide", "error"),
        ("d", "divide", "success"),
    ]
    assert [row["number"] for row in rows] == [1, 2, 3]
    assert rows[0]["fingerprint"] == rows[2]["fingerprint"] != rows[1]["fingerprint"]


def test_a_model_call_names_the_tools_whose_results_it_got(
    source: str, ledger: LedgerFile, make_agent: MakeAgent
) -> None:
    """With how often each was called in the turn before; a tool call has the turn that asked."""
    enable()
    answers = [uses("search", "search"), says("x"), uses("search"), says("y")]
    agent = make_agent(ScriptedModel(answers))
    agent("go")
    agent("on")
    # Not as they were inserted: some may have waited in a spill file.
    calls = sorted(ledger.calls(), key=lambda call: call["at_us"])
    assert [call["after_tools"] for call in calls] == ["", "search*2", "", "search"]
    assert [row["turn"] for row in ledger.tools()] == [1, 1, 1]


def test_tools_are_written_as_they_are_read() -> None:
    """Names that a model made up cost nothing but themselves, and there is an end to them."""
    assert tools_in(after_tools_text({"search": 9, "fetch": 1})) == {"fetch": 1, "search": 9}
    assert tools_in(after_tools_text({"a,b": 1, "a*b": 2})) == {"a_b": 3}
    many = {f"{n:03}" + "x" * 1_000: 1 for n in range(1_000)}
    assert len(after_tools_text(many)) <= MOST_TOOLS * (MAX_NAME + 1)


def test_equal_calls_are_recorded_without_a_loop_limit(
    source: str, ledger: LedgerFile, make_agent: MakeAgent
) -> None:
    """Without a loop limit, an audit can still show that there are loops."""
    enable()
    make_agent(ScriptedModel([uses("search"), uses("search"), says("x")]))("go")
    one, other = ledger.tools()
    assert one["fingerprint"] == other["fingerprint"] is not None


def test_cache_savings_are_recorded(
    source: str, ledger: LedgerFile, make_agent: MakeAgent, tmp_path: Any
) -> None:
    """Reading 90 tokens saved 0.9 of their price, writing 10 cost a quarter of it more."""
    policy = tmp_path / "limits.yaml"
    price = "{input: 4, output: 0, cache_read: 0.4, cache_write: 5}"
    policy.write_text(f"models: {{scripted: {{price: {price}}}}}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_LIMITS_POLICY", str(policy))
        enable()
    make_agent(ScriptedModel([says("x", usage=CACHED), says("x")]))("go")
    (call,) = ledger.calls()
    assert dollars(call["cache_saved_pico"]) == Decimal("0.000314")


@pytest.mark.parametrize("amount", [None, "0", "0.5", "-0.25", "1e30", "-1e30", "NaN"])
def test_an_amount_below_zero_is_kept(amount: str | None) -> None:
    """A cache that is written and never read costs money; what no column can hold is unknown."""
    given = None if amount is None else Decimal(amount)
    stored = signed_picodollars(given)
    assert stored is None if amount in (None, "1e30", "-1e30", "NaN") else dollars(stored) == given


def test_a_child_stands_under_its_parent(source: str, ledger: LedgerFile) -> None:
    """An agent used as a tool has its parent's id, and both have the root's."""
    enable()
    child = Agent(model=ScriptedModel([says("y")]), name="child", callback_handler=None)
    parent = Agent(
        model=ScriptedModel([uses("child", arguments={"input": "go"}), says("x")]),
        tools=[child.as_tool(name="child", description="Ask.")],
        name="parent",
        callback_handler=None,
    )
    parent("go")
    rows = {row["agent"]: row for row in ledger.invocations()}
    assert rows["child"]["parent_id"] == rows["parent"]["id"]
    assert rows["child"]["root_id"] == rows["parent"]["root_id"] == rows["parent"]["id"]
    assert {call["root_id"] or call["invocation_id"] for call in ledger.calls()} == {
        rows["parent"]["id"]
    }


# --- audit keys -----------------------------------------------------------------------------------


def test_audit_keys_are_recorded(
    source: str, ledger: LedgerFile, make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named keys are taken from the baggage and the agent; others are not."""
    monkeypatch.setenv("OTEL_LIMITS_AUDIT_KEYS", "tenant.id,user.id")
    enable()
    token = context.attach(baggage.set_baggage("user.id", "u1"))
    context.attach(baggage.set_baggage("secret", "s3cr3t"))
    try:
        make_agent(
            ScriptedModel([says("x")]), trace_attributes={"tenant.id": "acme", "other": "o"}
        )("go")
    finally:
        context.detach(token)
    (row,) = ledger.invocations()
    assert ledger.attributes() == {(row["id"], "tenant.id"): "acme", (row["id"], "user.id"): "u1"}


def test_an_agents_own_attribute_wins_over_the_baggage(
    ledger: LedgerFile, make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Baggage comes from outside, the agent's attribute from the program."""
    monkeypatch.setenv("OTEL_LIMITS_AUDIT_KEYS", "tenant.id")
    enable()
    token = context.attach(baggage.set_baggage("tenant.id", "spoofed"))
    try:
        make_agent(ScriptedModel([says("x")]), trace_attributes={"tenant.id": "acme"})("go")
    finally:
        context.detach(token)
    assert list(ledger.attributes().values()) == ["acme"]


# --- money ----------------------------------------------------------------------------------------


def test_money_is_exact(ledger: LedgerFile, make_agent: MakeAgent, tmp_path: Any) -> None:
    """A price keeps every digit, with its source and version; an unknown one is no price."""
    policy = tmp_path / "limits.yaml"
    policy.write_text("models: {scripted: {price: {input: 0.0375, output: 0.1}}}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_LIMITS_POLICY", str(policy))
        enable()
    make_agent(ScriptedModel([says("x")]))("go")
    make_agent(ScriptedModel([says("x")], model_id="unknown-model"))("go")
    known, unknown = ledger.calls()
    assert dollars(known["price_pico"]) == Decimal("0.000000875")
    assert known["price_source"].startswith("policy")
    assert known["price_version"]
    assert (unknown["price_pico"], unknown["price_source"], unknown["price_version"]) == (None,) * 3
    assert [row["price_pico"] for row in ledger.invocations()] == [known["price_pico"], 0]
    assert [row["unpriced_calls"] for row in ledger.invocations()] == [0, 1]


@pytest.mark.parametrize(
    ("price", "stored"),
    [
        (None, None),
        (Decimal(0), 0),
        (Decimal("0.000000000001"), 1),
        (Decimal("9223372.036854775807"), MAX_INTEGER),
        (Decimal("9223372.036854775808"), None),
        (Decimal("NaN"), None),
        (Decimal("Infinity"), None),
        (Decimal(-1), None),
    ],
)
def test_picodollars(price: Decimal | None, stored: int | None) -> None:
    """Prices are whole picodollars; what cannot be stored exactly is unknown, never 0."""
    assert picodollars(price) == stored
    if price is not None and stored is not None:
        assert dollars(stored) == price


@pytest.mark.parametrize("traps", [[], [decimal.Inexact]])
def test_picodollars_are_exact_whatever_context_the_application_has_set(traps: list[Any]) -> None:
    """A row is written on the thread of the agent, where an application may round to cents."""
    with decimal.localcontext(decimal.Context(prec=3, traps=traps)):
        assert picodollars(Decimal("1234.567890123456")) == 1_234_567_890_123_456
        assert dollars(1_234_567_890_123_456) == Decimal("1234.567890123456")


# --- exactly once ---------------------------------------------------------------------------------


def everything(ledger: LedgerFile) -> list[Any]:
    """All rows of a ledger."""
    return [ledger.calls(), ledger.invocations(), ledger.tools(), ledger.attributes()]


def test_a_replay_changes_nothing(
    source: str, ledger: LedgerFile, make_agent: MakeAgent, events: list[Event]
) -> None:
    """Replayed events leave the ledger unchanged."""
    enable(Limits(max_turns=3), observers=[events.append])
    make_agent(ScriptedModel(endless(uses("search"))))("go")
    before = everything(ledger)
    observer = LedgerObserver(ledger.address)
    for event in events * 2:
        observer(event)
    observer.close()
    assert everything(ledger) == before


def test_a_second_observer_changes_nothing(
    source: str, ledger: LedgerFile, make_agent: MakeAgent
) -> None:
    """Two that record the same events at the same time record them once."""
    second = LedgerObserver(ledger.address)
    enable(observers=[second])
    make_agent(ScriptedModel([uses("search"), says("x")]))("go")
    second.close()
    assert (len(ledger.calls()), len(ledger.invocations())) == (2, 1)


def call_of(invocation: str, span: str | None, **changes: Any) -> ModelCall:
    """Make a model call."""
    owner = Invocation(agent="a", id=invocation, root_id=invocation, trace_id="t" * 32)
    call = ModelCall(
        invocation=owner,
        number=1,
        model="m",
        kind="measured",
        usage=Usage(input=3, output=4),
        estimated=False,
        span_id=span,
        seconds=1.0,
    )
    return replace(call, **changes)


def test_the_same_fact_twice_is_one_call(ledger: LedgerFile) -> None:
    """Replayed rows, as from a spill file that was already restored, change nothing."""
    observer = LedgerObserver(ledger.address)
    for _ in range(2):
        observer(call_of("one", "s" * 16, at=1000.0))
    observer.close()
    assert len(ledger.calls()) == 1


def test_two_calls_of_one_span_are_two(ledger: LedgerFile) -> None:
    """The ids of spans say nothing about live calls: an application may make the same again."""
    observer = LedgerObserver(ledger.address)
    observer(call_of("one", "s" * 16, at=1000.0))
    observer(call_of("two", "s" * 16, at=1000.0))
    observer.close()
    assert [call["invocation_id"] for call in ledger.calls()] == ["one", "two"]


def test_two_calls_of_one_number_are_two(ledger: LedgerFile) -> None:
    """A call with a duplicate number but a different time is kept, without a number."""
    observer = LedgerObserver(ledger.address)
    twice = [call_of("one", None, number=2, at=2.0), call_of("one", None, number=2, at=2.5)]
    for call in (call_of("one", None, number=1, at=1.0), *twice, *twice):
        observer(call)
    observer.close()
    assert [call["number"] for call in ledger.calls()] == [1, 2, None]


def test_a_seeded_random_loses_no_call(ledger: LedgerFile, make_agent: MakeAgent) -> None:
    """A program that seeds `random` before each sample makes the same span ids: all count."""
    enable()
    for _ in range(5):
        random.seed(42)
        make_agent(ScriptedModel([uses("search"), says("x")]))("go")
    rows = ledger.calls()
    assert len(rows) == 10
    assert len({row["trace_id"] for row in ledger.invocations()}) == 1
    assert len({row["invocation_id"] for row in rows}) == 5


def test_end_of_an_invocation_is_recorded_once(ledger: LedgerFile) -> None:
    """A second end, a late beginning, and an end without a beginning do no harm."""
    observer = LedgerObserver(ledger.address)
    stop = Stop(
        reason="end_turn", action="none", breach=None, invocation_id="i", agent="a", turns=4
    )
    observer(stop)
    observer(replace(stop, reason="evicted", turns=9))
    observer.close()
    (row,) = ledger.invocations()
    assert (row["id"], row["reason"], row["turns"]) == ("i", "end_turn", 4)


# --- values from outside --------------------------------------------------------------------------


def test_huge_counts_are_exact(source: str, ledger: LedgerFile, make_agent: MakeAgent) -> None:
    """Up to the most that a figure can mean; beyond, the usage of the call is not readable."""
    enable()
    make_agent(ScriptedModel([says("x", usage=tokens(MAX_TOKENS + 1))]))("go")
    make_agent(ScriptedModel([says("x", usage=tokens(2**80))]))("go")
    exact, absurd = ledger.calls()
    assert (exact["input_tokens"], exact["output_tokens"]) == (MAX_TOKENS, 1)
    assert exact["state"] == "measured" != absurd["state"]
    assert absurd["input_tokens"] < 1000


def test_ledger_with_the_largest_calls_is_complete(
    ledger: LedgerFile,
    make_agent: MakeAgent,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Their prices cannot be stored, so they are unknown in the sums, too."""
    policy = tmp_path / "limits.yaml"
    policy.write_text("models: {'*': {price: {input: 16, output: 16}}}", encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable()
    most = {"inputTokens": MAX_TOKENS, "outputTokens": MAX_TOKENS, "totalTokens": 2 * MAX_TOKENS}
    calls = [uses("search", usage=most), uses("search", usage=most), says("x", usage=most)]
    make_agent(ScriptedModel(calls))("go")
    assert [call["price_pico"] for call in ledger.calls()] == [None] * 3
    otel_limits.disable()
    assert main(["audit", "verify", "--ledger", str(ledger.path)]) == 0, capsys.readouterr().out


def test_names_from_outside_are_made_safe(ledger: LedgerFile) -> None:
    """Surrogates, control characters and novels are no reason to lose a row."""
    enable()
    model = ScriptedModel([says("x")], model_id="m\x00\ud800" + "n" * 5000)
    Agent(model=model, name="a\x1b[31m", callback_handler=None)("go")
    (call,) = ledger.calls()
    assert call["agent"] == "a\N{REPLACEMENT CHARACTER}[31m"
    assert call["model"] == "m" + 2 * "\N{REPLACEMENT CHARACTER}" + "n" * 253


# --- switching ------------------------------------------------------------------------------------


def ledger_threads() -> list[threading.Thread]:
    """Return the threads that write a ledger."""
    return [each for each in threading.enumerate() if each.name == "otel-limits-ledger"]


def test_another_ledger_takes_over(
    ledger: LedgerFile, make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """`enable()` with another address records there; with the same one nothing changes."""
    enable()
    make_agent(ScriptedModel([says("x")]))("go")
    first = ledger_threads()
    enable()
    assert ledger_threads() == first != []
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", str(tmp_path / "other.db"))
    enable()
    make_agent(ScriptedModel([says("x")]))("go")
    assert len(ledger.calls()) == 1
    assert len(type(ledger)(tmp_path / "other.db").calls()) == 1


def test_disable_ends_recording(ledger: LedgerFile, make_agent: MakeAgent) -> None:
    """After `disable()` no thread and no observer is left."""
    others = set(ledger_threads())  # of a test before, whose disk is slow
    enable()
    agent = make_agent(ScriptedModel(endless(says("x"))))
    agent("go")
    assert set(ledger_threads()) - others
    otel_limits.disable()
    # A slow disk outlasts the wait of `disable()`.
    eventually(lambda: set(ledger_threads()) <= others)
    agent("go")
    assert (len(ledger.calls()), LIVE.audit_keys) == (1, ())


def test_a_plugin_records_too(ledger: LedgerFile, make_agent: MakeAgent) -> None:
    """An agent with its own limits is recorded where the environment names a ledger."""
    plugin = otel_limits.LimitsPlugin(Limits(max_turns=1))
    make_agent(ScriptedModel(endless(uses("search"))), plugins=[plugin])("go")
    assert [row["reason"] for row in ledger.invocations()] == ["max_turns"]


# --- streams that end early -----------------------------------------------------------------------


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
@pytest.mark.parametrize(
    ("answer", "estimated"),
    [
        (says("an answer"), 0),
        (says("an answer", usage=None), 1),
        (says("half an ans", error=ConnectionError("gone")), 1),
        (fails(ConnectionError("gone")), 0),
    ],
    ids=["whole", "unreported", "broken off", "not sent"],
)
def test_stream_that_ends_early_is_estimated(
    ledger: LedgerFile,
    capsys: pytest.CaptureFixture[str],
    subject: Any,
    answer: Any,
    estimated: int,
) -> None:
    """Its tokens are an estimate, so the audit does not call them measured."""
    is_broken_off = estimated and answer.error is not None
    if is_broken_off and subject.name == "langchain" and sys.version_info < (3, 11):
        pytest.skip(NO_CONTEXT)
    enable()
    agent = subject.agent(subject.model([answer]))
    with contextlib.suppress(Exception):  # each framework has another exception
        asyncio.run(subject.stream(agent))
    (row,) = ledger.calls()
    assert main(["audit", "spend", "--format", "json"]) == 0
    spent = json.loads(capsys.readouterr().out)
    assert (spent["totals"]["spend"]["estimated_calls"], row["estimated"]) == (estimated,) * 2
    assert spent["totals"]["spend"]["unmeasured_calls"] == 0
    assert ("100.0% of calls are estimated" in spent["complete"]) == (estimated == 1)


# --- calls outside the loop -----------------------------------------------------------------------


@pytest.fixture
def late(ledger: LedgerFile) -> LedgerFile:
    """A ledger with an invocation of two calls, one of its tool and one after its end."""
    enable()
    helper = ScriptedModel([says("x", usage=tokens(100))] * 2, model_id="helper")

    async def main() -> None:
        ended, tasks = asyncio.Event(), []

        async def later() -> None:
            await ended.wait()
            await read(helper)

        async def ask() -> str:
            tasks.append(asyncio.create_task(later()))
            return await read(helper)

        await asking(ask).invoke_async("go")
        ended.set()
        await tasks[0]

    asyncio.run(main())
    disable()  # the agent has waited for its own rows only
    return ledger


def ask(capsys: pytest.CaptureFixture[str], *question: str) -> Any:
    """Ask, and read the answer."""
    capsys.readouterr()
    assert main(["audit", *question, "--format", "json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_a_side_call_is_marked(late: LedgerFile) -> None:
    """Each row says it, those after the end too, and each number is there once."""
    # By number: what a slow moment had spilled reaches the database after what came later.
    rows = sorted(late.calls(), key=lambda row: row["number"])
    assert [(row["number"], row["model"], row["side"]) for row in rows] == [
        (1, "scripted", 0),
        (2, "helper", 1),
        (3, "scripted", 0),
        (4, "helper", 1),
    ]
    assert len({row["invocation_id"] for row in rows}) == 1


def test_spend_separates_side_calls(late: LedgerFile, capsys: pytest.CaptureFixture[str]) -> None:
    """They can be grouped by, and asked for alone."""
    rows = ask(capsys, "spend", "--by", "side")["spend"]
    assert {row["side"]: (row["calls"], row["tokens"]) for row in rows} == {
        "yes": (2, 200),
        "no": (2, 30),
    }
    chosen = ask(capsys, "spend", "--by", "model", "--where", "side=yes")["spend"]
    assert [(row["model"], row["calls"]) for row in chosen] == [("helper", 2)]


def test_show_counts_side_calls(late: LedgerFile, capsys: pytest.CaptureFixture[str]) -> None:
    """An invocation has all of its calls in its tree, and says how many its loop did not make."""
    (invocation,) = late.invocations()
    (row,) = ask(capsys, "show", invocation["id"])["tree"]
    assert (row["calls"], row["side_calls"], row["tokens"]) == (4, 2, 230)
