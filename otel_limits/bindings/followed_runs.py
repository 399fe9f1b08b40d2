"""Wrappers of methods that run an agent, from its start to its end: four ways to run one.

Each takes a function that begins an invocation, with the arguments of the method; `None`, or an
error in it, means that there are no limits. It returns the wrapper of a method of one kind.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any, TypeAlias

from otel_limits.core.internal_errors import suppress_errors, suppress_lapses

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable

    from otel_limits.bindings.invocation import InvocationInProgress


# --- wrappers of methods that run an agent --------------------------------------------------------
# Each takes a function that begins an invocation, with the arguments of the method; `None`, or an
# error in it, means that there are no limits. It returns the wrapper of a method of one kind.

BeginRun: TypeAlias = "Callable[..., InvocationInProgress | None]"
Wrapper: TypeAlias = "Callable[[Any], Any]"


def follow_run(begin: BeginRun) -> Wrapper:
    """Follow a method that runs an agent, from its start to its end."""
    guarded = suppress_lapses("binding")(begin)

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def run(*args: Any, **options: Any) -> Any:
            if (invocation := guarded(*args, **options)) is None:
                return original(*args, **options)
            failure: Exception | None = None
            try:
                with invocation:
                    try:
                        result = original(*args, **options)
                    except BaseException as error:  # noqa: BLE001  raised again if it is not ours
                        return invocation.end_by(error)
                return invocation.succeed(result)
            except Exception as error:
                failure = error
                raise
            finally:
                invocation.finish_after(failure)

        return run

    return wrap


def follow_run_async(begin: BeginRun) -> Wrapper:
    """Follow a coroutine method that runs an agent."""
    guarded = suppress_lapses("binding")(begin)

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        async def run(*args: Any, **options: Any) -> Any:
            if (invocation := guarded(*args, **options)) is None:
                return await original(*args, **options)
            failure: Exception | None = None
            try:
                with invocation:
                    try:
                        result = await original(*args, **options)
                    except BaseException as error:  # noqa: BLE001  raised again if it is not ours
                        return invocation.end_by(error)
                return invocation.succeed(result)
            except Exception as error:
                failure = error
                raise
            finally:
                invocation.finish_after(failure)

        return run

    return wrap


def follow_run_parts(begin: BeginRun) -> Wrapper:
    """Follow a method that runs an agent and yields parts, from the first part to its end."""
    guarded = suppress_lapses("binding")(begin)

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def run(*args: Any, **options: Any) -> Generator[Any, Any, Any]:
            parts = PartsOfRun(guarded(*args, **options))
            try:
                parts.start(lambda: iter(original(*args, **options)))
                result = yield from parts
                parts.end()
            except BaseException as error:  # noqa: BLE001  raised again if it is not ours
                result = parts.end_by(error)
                yield from parts.of_halt(result)
            finally:
                parts.finish()
            return result

        return run

    return wrap


def follow_run_parts_async(begin: BeginRun) -> Wrapper:
    """Follow an asynchronous method that runs an agent and yields parts."""
    guarded = suppress_lapses("binding")(begin)

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        async def run(*args: Any, **options: Any) -> AsyncGenerator[Any, Any]:
            parts = PartsOfAsyncRun(guarded(*args, **options))
            try:
                parts.start(lambda: owned(aiter(original(*args, **options))))
                async for part in parts:
                    try:
                        parts.sent = yield part
                    except GeneratorExit:
                        raise
                    except BaseException as error:  # noqa: BLE001  for the run
                        parts.thrown = error
                parts.end()
            except BaseException as error:  # noqa: BLE001  raised again if it is not ours
                for part in parts.of_halt(parts.end_by(error)):
                    yield part
            finally:
                await parts.aclose()

        return run

    return wrap


# --- the parts of a run ---------------------------------------------------------------------------
# Only what the agent's own code does belongs to it.


class PartsOfRun:
    """The parts of a run that blocks its thread, for `yield from`.

    Args:
        invocation: The run; `None` if it is not limited.
    """

    def __init__(self, invocation: InvocationInProgress | None) -> None:
        """Begin without a part."""
        self.invocation = invocation
        self.around = contextlib.nullcontext() if invocation is None else invocation
        self.generator: Any = None
        self._has_result = False
        self._failure: Exception | None = None

    def start(self, call: Callable[[], Any]) -> None:
        """Call the method."""
        with self.around:
            self.generator = call()

    def __iter__(self) -> PartsOfRun:
        """Return these parts."""
        return self

    def __next__(self) -> Any:
        """Return the next part."""
        with self.around:
            return self.shown(next(self.generator))

    def send(self, value: Any) -> Any:
        """Send a value into the run, and return the next part."""
        with self.around:
            return self.shown(self.generator.send(value))

    def throw(self, error: BaseException) -> Any:
        """Throw an exception into the run, and return the next part."""
        if not hasattr(self.generator, "throw"):
            raise error
        with self.around:
            return self.shown(self.generator.throw(error))

    def close(self) -> None:
        """Close the run, which its reader has left."""
        if hasattr(self.generator, "close"):
            with self.around:
                self.generator.close()

    def shown(self, part: Any) -> Any:
        """Return a part, with the stop if it is the model's last answer as a result."""
        invocation = self.invocation
        if invocation is None or not suppress_errors("binding")(invocation.is_result)(part):
            return part
        self._has_result = True
        return invocation.succeed(part)

    def end(self) -> None:
        """Note that the run has ended by itself."""
        if self.invocation is not None and not self._has_result:
            self.invocation.reason = "end_turn"

    def end_by(self, error: BaseException) -> Any:
        """Return the result of a run that was halted, or raise the exception that has ended it."""
        if self.invocation is None:
            raise error
        try:
            return self.invocation.end_by(error)
        except Exception as left:
            self._failure = left
            raise

    def of_halt(self, result: Any) -> Iterable[Any]:
        """Return the last parts of a run that was halted."""
        parts_of: Any = self.invocation and self.invocation.parts_of
        return suppress_errors("binding")(parts_of)(result) or ()

    def finish(self) -> None:
        """Note that the run is over."""
        if self.invocation is not None:
            self.invocation.finish_after(self._failure)


class PartsOfAsyncRun(PartsOfRun):
    """The parts of a run with an event loop."""

    sent: Any = None
    """The value that the reader has sent into the run with its request for a part."""
    thrown: BaseException | None = None
    """The exception that it has thrown into the run."""

    def __aiter__(self) -> PartsOfAsyncRun:
        """Return these parts."""
        return self

    async def __anext__(self) -> Any:
        """Return the next part."""
        with self.around:
            part = await self._request()
            if type(self.generator) is OwnedStream:  # no event loop knows of it
                self.generator = self.generator.generator
            return self.shown(part)

    def _request(self) -> Awaitable[Any]:
        stream, sent, thrown = self.generator, self.sent, self.thrown
        self.sent = self.thrown = None
        request: Awaitable[Any]
        if thrown is not None:
            if not hasattr(stream, "athrow"):
                raise thrown
            request = stream.athrow(thrown)
        elif sent is not None:
            request = stream.asend(sent)
        else:
            request = anext(stream)
        return request

    async def aclose(self) -> None:
        """Close the run, and note that it is over."""
        try:
            if hasattr(self.generator, "aclose"):
                with self.around:
                    await self.generator.aclose()
        finally:
            self.finish()


# --- streams closed by their reader ---------------------------------------------------------------


def owned(stream: Any) -> Any:
    """Return an asynchronous stream that its reader closes, and no event loop.

    A loop that ends closes all generators that it knows, concurrently. If one of them closes
    another one, the loop logs the failure of one of the two.
    """
    is_generator = inspect.isasyncgen(stream)
    return OwnedStream(stream) if is_generator else stream


class OwnedStream:
    """A generator of which no event loop knows, also if `generator` is read after its first part.

    Args:
        stream: The generator, of which nothing was read yet.
    """

    def __init__(self, stream: AsyncGenerator[Any, None]) -> None:
        """Take over a generator."""
        self.generator = stream

    def __aiter__(self) -> OwnedStream:
        """Return this stream."""
        return self

    def __anext__(self) -> Awaitable[Any]:
        """Return the next part, and keep the first request for one from the event loop."""
        # Generators report to their loop in the call, not in the wait that follows it.
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(None, None)
        try:
            return anext(self.generator)
        finally:
            sys.set_asyncgen_hooks(*hooks)

    async def aclose(self) -> None:
        """Close the generator."""
        await self.generator.aclose()
