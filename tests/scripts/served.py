"""An application as servers load it: each request calls an agent that loops forever.

It knows nothing of limits. The agent is one of Strands, or of the framework in the variable
`AGENTS_BY`. As a WSGI and as an ASGI application it answers with the number of model calls and with
how the invocation ended.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

if os.environ.get("AGENTS_BY") == "openai-agents":
    # Not by a statement: freezers would include that framework.
    call = importlib.import_module("sdk_agents").call
else:
    from strands_agents import call  # type: ignore[import-not-found, no-redef, unused-ignore]


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
