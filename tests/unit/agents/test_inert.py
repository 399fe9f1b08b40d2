"""Without a limit otel-limits only watches: nothing that an application can see changes."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel
from strands import ModelRetryStrategy
from strands.hooks import AfterInvocationEvent, BeforeToolCallEvent
from strands.types.exceptions import ModelThrottledException

from otel_limits import Limits, enable
from otel_limits.testing import ScriptedModel, fails, says, uses

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from strands import Agent

    from otel_limits.testing import Answer
    from tests.conftest import MakeAgent

pytestmark = pytest.mark.usefixtures("source")

RANDOM = re.compile(
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|0x[0-9a-f]+|\d{4}-\d\d-\d\d[T ][\d:.+Z]+"
    r"|[0-9a-f]{32}|\d+\.\d+(e-\d+)?"
)

TIMES = ("timeToFirstByteMs", "gen_ai.server.time_to_first_token")
"""Told only when they are above zero."""

TASKS = ("otel_limits.task.id",)
"""Only of an invocation that waits for an answer, or continues after one."""


class Verdict(BaseModel):
    """A structured output."""

    verdict: str = "fine"


def resume_once(agent: Agent) -> None:
    """Make `agent` start a second leg."""
    left = iter([True])

    def resume(event: AfterInvocationEvent) -> None:
        if next(left, False):
            event.resume = "once more"

    agent.hooks.add_callback(AfterInvocationEvent, resume)


def ask(agent: Agent) -> None:
    """Make every tool of `agent` wait for a human."""

    def interrupt(event: BeforeToolCallEvent) -> None:
        event.interrupt("approval", reason="may I?")

    agent.hooks.add_callback(BeforeToolCallEvent, interrupt)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Something an agent can go through."""

    answers: tuple[Answer, ...]
    prepare: Callable[[Agent], None] = lambda _: None
    arguments: Mapping[str, Any] = field(default_factory=dict)


SCENES = {
    "tools": Scene(answers=(uses("search"), uses("search"), says("done"))),
    "resume": Scene(answers=(says("one"), says("two")), prepare=resume_once),
    "interrupt": Scene(answers=(uses("search"),), prepare=ask),
    "output": Scene(
        answers=(says("well"), uses("Verdict")), arguments={"structured_output_model": Verdict}
    ),
    "throttled": Scene(answers=(fails(ModelThrottledException("slow")), says("done"))),
    "error": Scene(answers=(uses("search"), fails(ConnectionError("gone")))),
    "unmeasured": Scene(answers=(says("done", usage=None),)),
    "native limit": Scene(
        answers=(uses("search"), uses("search")), arguments={"limits": {"turns": 1}}
    ),
}


def plain(value: Any) -> Any:
    """`value` without what differs from run to run: ids, times, addresses."""
    if isinstance(value, Mapping):
        return {str(k): plain(each) for k, each in value.items() if k not in TIMES}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, str):
        return RANDOM.sub("…", value)
    if isinstance(value, bool | int | None):
        return value
    return RANDOM.sub("…", str(value)) if isinstance(value, Exception) else type(value).__name__


@dataclass(frozen=True, kw_only=True)
class Seen:
    """All that an application sees of one invocation."""

    events: list[Any]
    error: Any
    messages: Any
    state: Any
    usage: Any
    log: list[tuple[str, str, str]]
    spans: list[Any]


def run(
    scene: Scene,
    make_agent: MakeAgent,
    caplog: pytest.LogCaptureFixture,
    spans: InMemorySpanExporter,
) -> Seen:
    """Go through `scene` and keep everything that can be seen."""
    caplog.clear()
    spans.clear()
    strategy = ModelRetryStrategy(initial_delay=0, max_delay=0)
    agent = make_agent(ScriptedModel(scene.answers), retry_strategy=strategy)
    scene.prepare(agent)
    state: dict[str, Any] = {"mine": 1}
    events: list[Any] = []

    async def read() -> None:
        stream = agent.stream_async("go", invocation_state=state, **scene.arguments)
        async for event in stream:
            events.append(plain(event))  # noqa: PERF401  an exception leaves what came before it

    error = None
    try:
        asyncio.run(read())
    except Exception as raised:  # noqa: BLE001  compared below
        error = (type(raised), plain(raised))
    return Seen(
        events=events,
        error=error,
        messages=plain(agent.messages),
        state=plain(state),
        usage=plain(agent.event_loop_metrics.accumulated_usage),
        log=[(r.name, r.levelname, plain(r.getMessage())) for r in caplog.records],
        spans=[
            (
                s.name,
                s.status.status_code,
                sorted(set(s.attributes or ()).difference(TIMES, TASKS)),
                [e.name for e in s.events],
            )
            for s in spans.get_finished_spans()
        ],
    )


@pytest.mark.parametrize("limits", [Limits(), Limits(max_turns=99)], ids=["no limit", "far limit"])
@pytest.mark.parametrize("name", SCENES)
def test_nothing_is_to_be_seen(
    name: str,
    limits: Limits,
    make_agent: MakeAgent,
    caplog: pytest.LogCaptureFixture,
    spans: InMemorySpanExporter,
) -> None:
    """Events, results, messages, `invocation_state`, log and spans are as without us."""
    caplog.set_level(logging.DEBUG)
    run(SCENES[name], make_agent, caplog, spans)  # what Strands says once per process
    without = run(SCENES[name], make_agent, caplog, spans)
    enable(limits)
    run(SCENES[name], make_agent, caplog, spans)  # what we say once per process
    assert run(SCENES[name], make_agent, caplog, spans) == without


def test_the_comparison_would_notice(
    make_agent: MakeAgent, caplog: pytest.LogCaptureFixture, spans: InMemorySpanExporter
) -> None:
    """A limit that is reached is to be seen in the events, the messages and the log."""
    without = run(SCENES["tools"], make_agent, caplog, spans)
    enable(Limits(max_turns=2))
    halted = run(SCENES["tools"], make_agent, caplog, spans)
    assert halted.events != without.events
    assert halted.messages != without.messages
    assert halted.log != without.log


def test_invocation_state_gets_no_key_of_ours(make_agent: MakeAgent) -> None:
    """Not even under a limit that halts: graph nodes share that dict."""
    enable(Limits(max_turns=1))
    state: dict[str, Any] = {}
    make_agent(ScriptedModel([uses("search")]))("go", invocation_state=state)
    assert not [key for key in state if "limit" in key]


def test_enabling_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """`enable()` without a preset logs nothing."""
    caplog.set_level(logging.DEBUG)
    enable(Limits(max_turns=1))
    assert [record for record in caplog.records if record.name.startswith("otel_limits")] == []
