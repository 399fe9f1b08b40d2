"""Tracks `stream_events(version="v3")` of a model, which calls none of its other public methods."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.runnables.config import ensure_config, merge_configs

from otel_limits.bindings.langchain.chat_calls import FOLLOWED_BY_EVENTS, request_for
from otel_limits.core.internal_errors import suppress_errors, suppress_errors_async

if TYPE_CHECKING:
    from otel_limits.bindings.langchain.chat_calls import ChatRequest

VERSION = "v3"
"""Earlier versions call `astream`."""


def track_stream_events(original: Any) -> Any:
    """Wrap `BaseChatModel.stream_events`."""

    @functools.wraps(original)
    def stream_events(model: Any, input: Any, config: Any = None, **options: Any) -> Any:  # noqa: A002
        is_tracked = options.get("version") == VERSION
        request = request_for(model, input, **options) if is_tracked else None
        if request is None:
            return original(model, input, config, **options)
        if (refusal := request.admit_blocking()) is not None:
            return request.refused(refusal)
        FOLLOWED_BY_EVENTS.add(request)
        config = merge_configs(ensure_config(config), {"callbacks": [EndOfStream(request)]})
        try:
            return original(model, request.messages[0], config, **request.options)
        except BaseException as error:
            request.settle_blocking(error)
            raise

    return stream_events


def track_astream_events(original: Any) -> Any:
    """Wrap `BaseChatModel.astream_events`."""

    @functools.wraps(original)
    def astream_events(model: Any, input: Any, config: Any = None, **options: Any) -> Any:  # noqa: A002
        if options.get("version") != VERSION:
            return original(model, input, config, **options)
        return _astream_events(original, model, input, config, options)

    return astream_events


async def _astream_events(
    original: Any, model: Any, asked: Any, config: Any, options: dict[str, Any]
) -> Any:
    request = request_for(model, asked, **options)
    if request is None:
        return await original(model, asked, config, **options)
    if (refusal := await request.admit()) is not None:
        return request.refused(refusal)
    FOLLOWED_BY_EVENTS.add(request)
    config = merge_configs(ensure_config(config), {"callbacks": [EndOfAsyncStream(request)]})
    try:
        return await original(model, request.messages[0], config, **request.options)
    except BaseException as error:
        await request.settle(error)
        raise


class EndOfStream(BaseCallbackHandler):
    """Settles the call of a stream when it ends. One that is left is settled with the graph."""

    run_inline = True

    def __init__(self, request: ChatRequest) -> None:
        """Wait for the end of a request."""
        self._request = request

    def on_stream_event(self, event: Any, **_: Any) -> None:  # noqa: ARG002  LangChain's name
        """End the stream of a turn if its invocation was ended."""
        _end_if_cut(self._request)

    @suppress_errors("binding")
    def on_llm_end(self, response: Any, **_: Any) -> None:
        """Count the answer."""
        self._request.read_answer(response)
        self._request.settle_blocking()

    @suppress_errors("binding")
    def on_llm_error(self, error: BaseException, **more: Any) -> None:
        """Count the failure."""
        note_begun(self._request, more.get("response"))
        self._request.settle_blocking(error)


class EndOfAsyncStream(AsyncCallbackHandler):
    """Does the same for an asynchronous stream."""

    run_inline = True

    def __init__(self, request: ChatRequest) -> None:
        """Wait for the end of a request."""
        self._request = request

    async def on_stream_event(self, event: Any, **_: Any) -> None:  # noqa: ARG002
        """End the stream of a turn if its invocation was ended."""
        _end_if_cut(self._request)

    async def on_llm_end(self, response: Any, **_: Any) -> None:
        """Count the answer."""
        self._request.read_answer(response)
        await self._settle(None)

    async def on_llm_error(self, error: BaseException, **more: Any) -> None:
        """Count the failure."""
        note_begun(self._request, more.get("response"))
        await self._settle(error)

    @suppress_errors_async("binding")
    async def _settle(self, error: BaseException | None) -> None:
        await self._request.settle(error)


def _end_if_cut(request: ChatRequest) -> None:
    invocation = request.invocation
    # LangChain would only log the error of a side call.
    if invocation is not None and request.is_cut and invocation.end is not None:
        request.end_by(invocation.end)


@suppress_errors("binding")
def note_begun(request: ChatRequest, response: Any) -> None:
    """Note an answer that was broken off: its vendor bills what it has sent."""
    if response is not None and any(response.generations):
        request.calls[0].answered = request.calls[0].has_content = True
