"""An application as servers load it: each request calls an agent that loops forever.

It knows nothing of limits. As a WSGI and as an ASGI application it answers with the number of model
calls and with how the invocation ended.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from strands import Agent, tool

from otel_limits.testing import ScriptedModel, says, uses

MOST_CALLS = 12
"""Where nothing limits it, it ends by itself."""


@tool
def search() -> str:
    """Search."""
    return "nothing found"


def make_agent(name: str = "served") -> Agent:
    """Make an agent."""
    model = ScriptedModel([*[uses("search")] * MOST_CALLS, says("I was never stopped")])
    return Agent(model=model, tools=[search], name=name, callback_handler=None)


def call(name: str = "served") -> dict[str, Any]:
    """Call a new agent."""
    agent = make_agent(name)
    reason = str(agent("go").stop_reason)
    return {"model_calls": agent.model.calls, "stop_reason": reason}  # type: ignore[attr-defined]


def wsgi_app(respond: Callable[[], object]) -> Any:
    """Return an application of a server such as gunicorn."""

    def app(_environ: dict[str, Any], start: Callable[..., object]) -> Iterable[bytes]:
        start("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(respond()).encode()]

    return app


def asgi_app(respond: Callable[[], object]) -> Any:
    """Return an application of a server such as uvicorn."""

    async def app(
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        if scope["type"] == "lifespan":
            for answer in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{answer}.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(respond()).encode()})

    return app


wsgi, asgi = wsgi_app(call), asgi_app(call)
idle = asgi_app(dict)
