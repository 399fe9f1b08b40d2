"""Clients that call a vendor by its own address, on loopback."""

from __future__ import annotations

from typing import Any

import httpx


def clients(url: str) -> dict[str, Any]:
    """Return HTTP clients, for one thread and for event loops, that send everything to a server."""
    return {
        "http_client": httpx.Client(transport=OnLoopback(url)),
        "http_async_client": StaysOpen(transport=OnLoopbackAsync(url)),
    }


class StaysOpen(httpx.AsyncClient):
    """Is used for several requests: Strands closes it after each."""

    async def aclose(self) -> None:
        """Do nothing."""


class OnLoopback(httpx.HTTPTransport):
    """Sends each request to a server on loopback."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.server = httpx.URL(url)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request."""
        return super().handle_request(_moved(request, self.server))


class OnLoopbackAsync(httpx.AsyncHTTPTransport):
    """Does the same in an event loop."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.server = httpx.URL(url)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request."""
        return await super().handle_async_request(_moved(request, self.server))


def _moved(request: httpx.Request, server: httpx.URL) -> httpx.Request:
    at = request.url.copy_with(scheme=server.scheme, host=server.host, port=server.port)
    return httpx.Request(
        request.method,
        at,
        headers=request.headers,
        stream=request.stream,
        extensions=request.extensions,
    )
