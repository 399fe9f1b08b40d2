"""Every way out to a provider: each call of `Model.stream` is opened, followed and counted here."""

from __future__ import annotations

import functools
from types import FunctionType
from typing import TYPE_CHECKING, Any

from otel_limits.bindings.strands.attach import attach, is_staged
from otel_limits.bindings.strands.halting import let_out
from otel_limits.bindings.strands.invocations import Live
from otel_limits.bindings.strands.reading import (
    estimate_tokens,
    model_id,
    note_chunk,
    provider_of,
    span_of_call,
)
from otel_limits.bindings.strands.stages import PASS, note_failure
from otel_limits.core.faults import never_raises
from otel_limits.runs.calls import FOLLOWED
from otel_limits.runs.run import Run
from otel_limits.runs.tree import CURRENT

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from otel_limits.bindings.strands.stages import ModelPass
    from otel_limits.runs.calls import OpenCall


def followed_stream(original: Any) -> Any:
    """Make what stands in the place of a model's `stream`."""
    # Not always a function: another instrumentation may have put its own thing there.
    call = original if isinstance(original, FunctionType) else _as_function(original)

    @functools.wraps(original)
    def stream(model: Any, *args: Any, **kwargs: Any) -> Any:
        run, model_pass = CURRENT.get(), PASS.get()
        ask = functools.partial(call, model, *args, **kwargs)
        messages = args[0] if args else kwargs.get("messages", "")
        if model_pass is not None and model_pass.live.run is run:
            return _follow(run, model_pass, model, messages, ask)  # also of one that was evicted
        if isinstance(run, Run) and not run.finished:
            return _follow(run, None, model, messages, ask)
        return ask()

    return stream


def _as_function(method: Any) -> Callable[..., Any]:
    """Return what takes an object first, of whatever stands for a method of its class."""
    bind = getattr(method, "__get__", lambda _, __: method)
    return lambda model, *args, **kwargs: bind(model, type(model))(*args, **kwargs)


async def _follow(
    run: Run,
    model_pass: ModelPass | None,
    model: Any,
    messages: object,
    ask: Callable[[], AsyncGenerator[Any, None]],
) -> AsyncGenerator[Any, None]:
    """Let a call out, pass on what the provider streams, and count the call when it ends."""
    if FOLLOWED.get() in run.calls.under_way:  # a call that is followed asks this in its turn
        async for chunk in ask():
            yield chunk
        return
    call = _let_go(run, model_pass, model, messages)
    answered, events = False, None
    try:
        # Only now, as a provider's own `stream` may be a function that sends at once.
        events = ask()
        chunks = aiter(events)
        while True:
            token = FOLLOWED.set(call)
            try:
                chunk = await anext(chunks)
            except StopAsyncIteration:
                answered = True
                break
            finally:
                FOLLOWED.reset(token)
            if call is not None:
                note_chunk(call, chunk)
            yield chunk
    except Exception as error:
        # Here, as a middleware may ask again before anybody else learns of the failure.
        _settle(run, call, failed=True)
        note_failure(model_pass, error)
        raise
    finally:
        if answered or model_pass is None:  # else the stage knows whether the loop had its answer
            _settle(run, call)
        if (close := getattr(events, "aclose", None)) is not None:
            await close()


def _let_go(
    run: Run, model_pass: ModelPass | None, model: Any, messages: object
) -> OpenCall | None:
    """Judge a call, and open it."""
    _judge(run, model_pass)
    # Once more where a fault broke it off: a call that is not opened is not counted.
    return _open(run, model_pass, model, messages) or _open(run, model_pass, model, messages)


def _judge(run: Run, model_pass: ModelPass | None) -> None:
    """Refuse a call of the agent's loop that no limit has a place for; others are not judged."""
    if model_pass is not None:
        _attach_again(model_pass.live)
        if not model_pass.is_judged:  # a middleware asks again, and more has been used by now
            let_out(model_pass.live, None)
        model_pass.is_judged = False
    elif isinstance(live := run.state, Live) and _attach_again(live):
        # Our stage was not in the agent's registry any more: this is its loop.
        live.asked = True
        let_out(live, None)


@never_raises("binding")
def _attach_again(live: Live) -> bool:
    """Stay attached where an application has replaced a registry; True when stages were lost."""
    agent = live.agent()
    if agent is None or (agent.hooks is live.hooks and is_staged(agent)):
        return False
    was_staged = is_staged(agent)
    attach(agent)
    live.hooks = agent.hooks
    return not was_staged


@never_raises("binding")
def _open(run: Run, model_pass: ModelPass | None, model: Any, messages: object) -> OpenCall:
    projected = None if model_pass is None else model_pass.context.projected_input_tokens
    asked = estimate_tokens(messages) if projected is None else projected
    call = run.calls.open(model_id(model), asked, provider_of(model.__class__))
    call.span_id = None if model_pass is None else span_of_call(run)
    if model_pass is not None:
        model_pass.calls.append(call)
    return call


@never_raises("binding")
def _settle(run: Run, call: OpenCall | None, *, failed: bool = False) -> None:
    """Count a call that has not been counted yet."""
    if call is not None and call.is_open:
        estimate = 0 if failed else call.output_estimate
        run.calls.settle(call, failed=failed, output_estimate=estimate)
