"""The whole binding of a small framework, `tests.bots`: as that of anybody else's would be."""

from __future__ import annotations

import asyncio
import functools
import itertools
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from otel_limits.bindings.class_patches import subclasses_of
from otel_limits.bindings.extensions import declined_verdict, extend, question
from otel_limits.bindings.framework import BaseFramework
from otel_limits.bindings.invocation import (
    InvocationInProgress,
    ToolAnswer,
    abort_all,
    invocation_of_task,
    scope_of_task,
)
from otel_limits.bindings.model_call import (
    IDS,
    ModelCallInProgress,
    answered,
    enclosing_request,
    streamed,
)
from otel_limits.bindings.path import halt_from_error
from otel_limits.bindings.tool_call import ToolCallInProgress, run_tool
from otel_limits.core.errors import limit_reached
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.stop_json import MARKER, stop_to_json
from otel_limits.core.usage import Usage, measured
from otel_limits.runs.calls import InFlightCall
from otel_limits.usage.text import tokens_of_text
from tests.bots import Bot, Ending, Message, Model, Reply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

    from otel_limits.core.policy import Verdict


class EndError(BaseException):
    """Ends a bot from a model call: halted, or paused for a person."""

    def __init__(self, verdict: Verdict, *, asks: bool = False) -> None:
        super().__init__(verdict.reason)
        self.verdict, self.asks = verdict, asks


# --- an invocation --------------------------------------------------------------------------------


@dataclass(eq=False)
class BotRun(InvocationInProgress):
    """One run of a bot."""

    bot: Bot = field(kw_only=True)

    @classmethod
    def begin(cls, bot: Bot, answer: Any) -> BotRun | None:
        """Begin a run, with the answer of a person if the last one has ended with a question."""
        if (host := BOTS.host) is None or not host.is_on:
            return None
        host.prepare(has_own=False)
        policy, declined = host.policy(bot.name), None
        if (asked := bot.said[-1].pop("asked", None) if bot.said else None) is not None:
            policy, declined = extend(policy, answer), declined_verdict(asked, answer)
        return cls.start(host, bot.name, policy=policy, bot=bot, verdict=declined)

    def ending(self, error: BaseException) -> Ending:
        """Return the end of a run that was halted or paused; raise any other error again."""
        verdict = error.verdict if isinstance(error, EndError) else None
        if verdict is None and isinstance(error, Exception):  # e.g. of a refused side call
            verdict = halt_from_error(self, error)
        if verdict is None:
            raise error
        if isinstance(error, EndError) and error.asks:
            asked = question(verdict, self.run.invocation)
            self.bot.said.append({"by": "bot", "text": asked["question"], "asked": asked})
            return Ending("paused", self.bot.said[-1])
        self.bot.said.append({"by": "bot", "text": self.halt(verdict)})
        if self.run.raised:
            raise limit_reached(verdict, self.run.stop(verdict.reason)) from error
        return self.marked(Ending(verdict.reason, self.bot.said[-1]), synthetic=True)

    def marked(self, ending: Ending, *, synthetic: bool = False) -> Ending:
        """Return the end with the stop of a halt, if there is one."""
        if self.is_halted and self.run.verdict is not None:
            ending.reason = self.run.verdict.reason
            stop = stop_to_json(self.run.stop(ending.reason))
            ending.message[MARKER] = {**stop, "synthetic": synthetic}
        return ending


def track_stream(original: Any) -> Any:
    """Wrap `Bot.stream`, which `Bot.run` calls."""

    @functools.wraps(original)
    async def stream(bot: Bot, text: Any) -> AsyncIterator[Any]:
        run = BotRun.begin(bot, text)
        parts = original(bot, text)
        if run is None:
            async with aclosing(parts):
                async for part in parts:
                    yield part
            return
        reason, failure = "aborted", None
        try:
            part = None
            while not isinstance(part, Ending):
                with run:  # and not while its reader works
                    try:
                        part = await anext(parts)
                    except BaseException as error:  # noqa: BLE001  raised again if it is not ours
                        part = run.ending(error)
                if isinstance(part, Ending):
                    reason = run.marked(part).reason if part.reason == "done" else part.reason
                yield part
        except Exception as error:
            reason, failure = "error" if run.run.verdict is None else run.run.verdict.reason, error
            raise
        finally:
            await parts.aclose()
            run.finish(reason, failure)

    return stream


# --- a model call ---------------------------------------------------------------------------------


@dataclass(eq=False)
class BotCall(ModelCallInProgress):
    """One request of a bot, or of one of its tools."""

    messages: list[Message] = field(kw_only=True)
    tools: Sequence[str] = field(kw_only=True)

    @classmethod
    @suppress_errors("binding")
    def begin(cls, model: Model, messages: list[Message], tools: Sequence[str]) -> BotCall | None:
        """Describe a request; `None` if it belongs to no run."""
        path, run = scope_of_task(BotRun)
        if run is None:
            return None
        tokens = sum(tokens_of_text(each["text"]) for each in messages)
        call, outer = InFlightCall(type(model).__name__, tokens, "bots"), enclosing_request(run)
        asked: dict[str, Any] = {"messages": messages, "tools": tools, "outer": outer}
        if outer is not None and outer.gives_call(call):  # `ask` within `tell`
            return cls(run, path, [*outer.calls], is_admitted=True, **asked)
        if path is not None:
            call.id = str(next(IDS))
            said = [each for each in messages if each["by"] == "tool"]
            path.end_turns({each["id"]: ToolAnswer(each["text"], is_error=True) for each in said})
        return cls(run, path, [call], can_ask=True, **asked)

    def add_note(self, note: str) -> None:
        """Let the user say it."""
        self.messages = [*self.messages, {"by": "user", "text": note}]

    def remove_tools(self, note: str) -> None:
        """Offer no tools."""
        self.add_note(note)
        self.tools = ()

    def note_part(self, part: Any) -> bool:
        """Note a part of a text, or the reply, which is the last part."""
        if isinstance(part, Reply):
            self.note_answer(part)
            return True
        self.calls[0].has_content = True
        self.calls[0].parts.append(part)
        return False

    def note_answer(self, answer: Reply) -> None:
        """Note a reply."""
        used = measured(Usage(input=answer.tokens[0], output=answer.tokens[1]))
        self.note(self.calls[0], answer, used, answer.text)

    def text_of(self, answer: Reply) -> str:
        """Return its text."""
        return answer.text

    def tools_of(self, answer: Reply) -> Iterable[tuple[str, str, object]]:
        """Return the requested tools."""
        return answer.tools

    def end_with_last(self, answer: Reply, text: str) -> None:  # noqa: ARG002
        """Remove tools that were requested anyway."""
        answer.tools = ()

    def asked(self, verdict: Verdict) -> NoReturn:
        """Pause the bot."""
        raise EndError(verdict, asks=True)

    def halted(self, verdict: Verdict, cause: BaseException | None) -> NoReturn:
        """End the bot."""
        raise EndError(verdict) from cause


def track_ask(original: Any) -> Any:
    """Wrap `ask` of a model."""

    @functools.wraps(original)
    async def ask(model: Model, messages: list[Message], tools: Sequence[str]) -> Reply:
        if (call := BotCall.begin(model, messages, tools)) is None:
            return await original(model, messages, tools)
        return await answered(call, lambda: original(model, call.messages, call.tools))

    return ask


def track_tell(original: Any) -> Any:
    """Wrap `tell` of a model."""

    @functools.wraps(original)
    def tell(model: Model, messages: list[Message], tools: Sequence[str]) -> AsyncIterator[Any]:
        if (call := BotCall.begin(model, messages, tools)) is None:
            return original(model, messages, tools)
        return streamed(call, lambda: original(model, call.messages, call.tools))

    return tell


# --- a tool call ----------------------------------------------------------------------------------


class BotTool(ToolCallInProgress):
    """One call of a tool, whose result is a text."""

    def refused(self, note: str) -> str:
        """Return the text."""
        return note

    def text_of(self, result: str) -> str:
        """Return the text."""
        return result

    def with_text(self, result: str, text: str) -> str:  # noqa: ARG002
        """Return the other text."""
        return text


def track_use(original: Any) -> Any:
    """Wrap `Bot.use`."""

    @functools.wraps(original)
    async def use(bot: Bot, identity: str, name: str, argument: Any) -> str:
        run = invocation_of_task(BotRun)
        if run is None or name not in bot.tools:
            return await original(bot, identity, name, argument)
        requested = run.tools.get(identity) or run.resume_tool(identity, name, argument)
        tool = BotTool(run, requested)
        return await run_tool(tool, lambda: original(bot, identity, name, argument))

    return use


# --- the framework --------------------------------------------------------------------------------


class BotFramework(BaseFramework):
    """Wraps what bots do."""

    name = module = distribution = requirement = "bots"
    stop_reasons = ("done", "paused")
    successes = ("done",)

    def watch(self) -> None:
        """Track every bot."""
        self.patches.wrap(Bot, "stream", track_stream)
        self.patches.wrap(Bot, "use", track_use)
        self.patches.watch_subclasses(Model, self._patch_model)
        for model in (Model, *subclasses_of(Model)):
            self._patch_model(model)

    def _patch_model(self, model: type[Model]) -> None:
        self.patches.wrap(model, "ask", track_ask)
        self.patches.wrap(model, "tell", track_tell)

    def release(self) -> bool:
        """Track none."""
        self.patches.restore()
        abort_all(BotRun)
        return False

    def marker_of(self, result: Any) -> Mapping[str, Any] | None:
        """Return the stop in the last message."""
        message = getattr(result, "message", result)
        return message.get(MARKER) if isinstance(message, dict) else None

    def run_away(self, most_calls: int, observe: Callable[[], None]) -> tuple[int, str]:
        """Run a bot whose model requests a tool again and again."""
        asked = itertools.count(1)

        class Runaway(Model):
            async def ask(self, messages: Any, tools: Any) -> Reply:  # noqa: ARG002
                number = next(asked)
                return Reply(tools=[] if number > most_calls else [(str(number), "look", None)])

        async def look(_: Any) -> str:
            observe()
            return "nothing"

        ending = asyncio.run(Bot("runaway", Runaway(), {"look": look}).run("go"))
        return next(asked) - 1, ending.reason


BOTS = BotFramework()
"""What the entry point of a distribution names."""
