"""Halts over A2A: a real server on loopback, and what its client is told."""

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

# What the a2a SDK and the web server say about their own next releases is not about us.
pytestmark = pytest.mark.filterwarnings("ignore")


@tool
def search() -> str:
    """Search."""
    return "nothing found"


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Serve agents with a script over A2A; returns the address."""
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
def test_the_client_is_told_of_a_halt(serve: Callable[..., str], *, compliant: bool) -> None:
    """Which limit, its cap, what was used, and that no model wrote the answer."""
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


def test_requests_at_once_are_held_and_told_one_by_one(
    serve: Callable[..., str], events: list[Event]
) -> None:
    """Each is an invocation with a budget of its own, and its client is told of that alone."""
    enable(Limits(max_turns=2), tree=Limits(max_model_calls=9), observers=[events.append])
    address = serve(endless(uses("search")))
    with ThreadPoolExecutor(6) as pool:
        tasks = list(pool.map(ask, [address] * 6))
    assert [task["metadata"]["otel_limits"]["reason"] for task in tasks] == ["max_turns"] * 6
    stops = [event for event in events if isinstance(event, Stop)]
    assert [(stop.turns, stop.model_calls) for stop in stops] == [(2, 2)] * 6


def test_a_last_answer_is_not_synthetic(serve: Callable[..., str]) -> None:
    """The client can tell it from our text."""
    enable(Limits(max_turns=1), action="wrap_up")
    told = ask(serve([uses("search"), says("summary")]))["metadata"]["otel_limits"]
    assert (told["reason"], told["action"], told["synthetic"]) == ("max_turns", "wrapped_up", False)


def test_a_task_that_failed_says_why(serve: Callable[..., str]) -> None:
    """The exception of the action `raise` reaches no client; its reason does."""
    enable(Limits(max_turns=1), action="raise")
    task = ask(serve(endless(uses("search"))))
    assert task["status"]["state"] == "failed"
    assert task["metadata"]["otel_limits"]["reason"] == "max_turns"


@pytest.mark.parametrize("action", ["halt", "observe"])
def test_nothing_is_said_where_nothing_was_halted(serve: Callable[..., str], action: Any) -> None:
    """Also where it would have been."""
    enable(Limits(max_turns=1 if action == "observe" else 9), action=action)
    task = ask(serve([uses("search"), says("done")]))
    assert "otel_limits" not in (task.get("metadata") or {})


def test_nothing_is_said_when_switched_off(serve: Callable[..., str]) -> None:
    """The server goes on without us."""
    enable(Limits(max_turns=1))
    address = serve([uses("search"), says("done")])
    otel_limits.disable()
    assert "otel_limits" not in (ask(address).get("metadata") or {})
