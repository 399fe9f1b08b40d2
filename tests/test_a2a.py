"""Halts over A2A: a real server on loopback and the task that its client gets."""

from __future__ import annotations

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

        app = A2AServer(agent_factory=agent, host="127.0.0.1", **options).to_starlette_app()
        server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level="error"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        servers.append((server, thread))
        port = server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}/"

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
