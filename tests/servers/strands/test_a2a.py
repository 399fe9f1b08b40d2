"""Halts over A2A: a real server on loopback and the task that its client gets."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from strands import Agent, tool

import otel_limits
from otel_limits import Event, Limits, Stop, enable
from otel_limits.testing import ScriptedModel, endless, says, uses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("a2a")

# Deprecation warnings of the a2a SDK and the web server are none of our business.
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = "This request could not be completed because it took too many steps."


@tool
def search() -> str:
    """Search."""
    return "nothing found"


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Serve scripted agents over A2A and return the address."""
    servers: list[tuple[Any, threading.Thread]] = []

    def start(script: Any, **options: Any) -> str:
        from strands.multiagent.a2a import A2AServer

        def agent(_: str) -> Agent:
            return Agent(
                model=ScriptedModel(script),
                tools=[search],
                name="served",
                description="Searches.",
                callback_handler=None,
            )

        listener = socket.create_server(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        card: dict[str, Any] = {"host": "127.0.0.1", "http_url": address}
        app = A2AServer(agent_factory=agent, **card, **options).to_starlette_app()
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        servers.append((server, thread))
        return address

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join()


def ask(address: str) -> Any:
    """Send a message as a client does, and return the task."""
    message = {
        "role": "user",
        "messageId": uuid.uuid4().hex,
        "parts": [{"kind": "text", "text": "go"}],
    }
    request = {"jsonrpc": "2.0", "id": 1, "method": "message/send", "params": {"message": message}}
    answer = httpx.post(address, json=request, timeout=30).json()
    return answer["result"]


@pytest.mark.parametrize("compliant", [False, True])
def test_halt_is_reported_in_task_metadata(serve: Callable[..., str], *, compliant: bool) -> None:
    """The task names the limit, its cap and the usage, and marks the answer as synthetic."""
    enable(Limits(max_turns=2))
    task = ask(serve(endless(uses("search")), enable_a2a_compliant_streaming=compliant))
    assert task["status"]["state"] == "completed"
    assert task["metadata"]["otel_limits"] == {
        "reason": "max_turns",
        "action": "halted",
        "limit": "max_turns",
        "cap": 2,
        "observed": 2,
        "synthetic": True,
    }


def test_concurrent_requests_are_limited_separately(
    serve: Callable[..., str], events: list[Event]
) -> None:
    """Each request is an invocation with its own budget and gets only its own halt."""
    enable(Limits(max_turns=2), tree=Limits(max_model_calls=9), observers=[events.append])
    address = serve(endless(uses("search")))
    with ThreadPoolExecutor(6) as pool:
        tasks = list(pool.map(ask, [address] * 6))
    assert [task["metadata"]["otel_limits"]["reason"] for task in tasks] == ["max_turns"] * 6
    stops = [event for event in events if isinstance(event, Stop)]
    assert [(stop.turns, stop.model_calls) for stop in stops] == [(2, 2)] * 6


def test_last_answer_is_not_synthetic(serve: Callable[..., str]) -> None:
    """Clients can distinguish the model's answer from our text."""
    enable(Limits(max_turns=1), action="wrap_up")
    told = ask(serve([uses("search"), says("summary")]))["metadata"]["otel_limits"]
    assert (told["reason"], told["action"], told["synthetic"]) == ("max_turns", "wrapped_up", False)


def test_failed_task_reports_its_reason(serve: Callable[..., str]) -> None:
    """An exception of action `raise` never reaches the client, so the task needs its reason."""
    enable(Limits(max_turns=1), action="raise")
    task = ask(serve(endless(uses("search"))))
    assert task["status"]["state"] == "failed"
    assert task["metadata"]["otel_limits"]["reason"] == "max_turns"


@pytest.mark.parametrize("action", ["halt", "observe"])
def test_task_without_halt_has_no_metadata(serve: Callable[..., str], action: Any) -> None:
    """A would-be halt adds no metadata either."""
    enable(Limits(max_turns=1 if action == "observe" else 9), action=action)
    task = ask(serve([uses("search"), says("done")]))
    assert "otel_limits" not in (task.get("metadata") or {})


def test_task_while_disabled_has_no_metadata(serve: Callable[..., str]) -> None:
    """The server works as without otel-limits."""
    enable(Limits(max_turns=1))
    address = serve([uses("search"), says("done")])
    otel_limits.disable()
    assert "otel_limits" not in (ask(address).get("metadata") or {})


@pytest.mark.parametrize("compliant", [False, True])
@pytest.mark.parametrize("action", ["halt", "wrap_up", "raise"])
def test_result_of_client_has_the_stop_that_its_server_reports(
    serve: Callable[..., str], action: Any, *, compliant: bool
) -> None:
    """The client's process is enabled, too, and its own limit was not reached."""
    from strands.agent.a2a_agent import A2AAgent

    enable(Limits(max_turns=1), action=action)
    script = [uses("search"), says("summary")]
    result = A2AAgent(serve(script, enable_a2a_compliant_streaming=compliant))("go")
    stop = otel_limits.stop_of(result)
    assert stop is not None
    assert otel_limits.stops_of(result) == (stop,)
    assert (stop.reason, stop.agent) == ("max_turns", "served")
    assert stop.breach is not None
    assert (stop.breach.limit, stop.breach.cap, stop.breach.observed) == ("max_turns", 1, 1)
    assert otel_limits.is_synthetic(result.message) == (action != "wrap_up")


@pytest.mark.parametrize("policy", ["complete", "fail"])
def test_graph_of_clients_has_their_stops(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """A remote node is no agent of this process: it completes, and the result shows its halt."""
    from strands.agent.a2a_agent import A2AAgent
    from strands.multiagent import GraphBuilder

    monkeypatch.setenv("OTEL_LIMITS_HALTED_NODE", policy)
    enable(Limits(max_turns=1))
    builder = GraphBuilder()
    builder.add_node(A2AAgent(serve(endless(uses("search")))), "remote")
    builder.set_entry_point("remote")
    builder.set_max_node_executions(2)
    stops = otel_limits.stops_of(builder.build()("go"))
    assert [(stop.agent, stop.reason, stop.action) for stop in stops] == [
        ("served", "max_turns", "halted")
    ]


def test_result_of_client_without_a_halt_has_no_stop(serve: Callable[..., str]) -> None:
    """Nothing was halted."""
    from strands.agent.a2a_agent import A2AAgent

    enable(Limits(max_turns=9))
    result = A2AAgent(serve([uses("search"), says("done")]))("go")
    assert otel_limits.stop_of(result) is None


def streamed(address: str) -> tuple[list[str], list[str]]:
    """Stream a task to a client; return the texts of status updates and those of artifacts."""
    from a2a.types import TaskArtifactUpdateEvent, TaskStatusUpdateEvent
    from a2a.utils import get_text_parts
    from strands.agent.a2a_agent import A2AAgent

    statuses: list[str] = []
    artifacts: list[str] = []

    async def read() -> None:
        async for event in A2AAgent(address).stream_async("go"):
            _, update = event.get("event", (None, None))
            if isinstance(update, TaskStatusUpdateEvent) and update.status.message:
                statuses.extend(get_text_parts(update.status.message.parts))
            elif isinstance(update, TaskArtifactUpdateEvent):
                artifacts.extend(get_text_parts(update.artifact.parts))

    asyncio.run(read())
    return statuses, artifacts


@pytest.mark.parametrize("compliant", [False, True])
@pytest.mark.parametrize(
    ("action", "texts"),
    [("halt", [STEPS]), ("wrap_up", ["summary", f"\n{STEPS}"])],
)
def test_text_of_a_halt_is_streamed_to_the_client_once(
    serve: Callable[..., str], action: Any, texts: list[str], *, compliant: bool
) -> None:
    """As the server streams any answer: as an artifact, or as updates and then an artifact."""
    enable(Limits(max_turns=1), action=action)
    address = serve([uses("search"), says("summary")], enable_a2a_compliant_streaming=compliant)
    expected = ([], [*texts, ""]) if compliant else (texts, ["\n".join([*texts, ""])])
    assert streamed(address) == expected


def test_raised_halt_streams_no_text_to_the_client(serve: Callable[..., str]) -> None:
    """The task fails, with the framework's words."""
    enable(Limits(max_turns=1), action="raise")
    assert streamed(serve(endless(uses("search")))) == (["Agent execution failed"], [])
