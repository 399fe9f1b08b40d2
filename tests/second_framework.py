"""The whole binding of a small framework, `tests.bots`, as its authors would write it."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from otel_limits.bindings.admission import halt_from_error
from otel_limits.bindings.class_patches import subclasses_of
from otel_limits.bindings.extensions import declined_verdict, extend, question
from otel_limits.bindings.framework import BaseFramework
from otel_limits.bindings.invocation import (
    InvocationInProgress,
    ToolAnswer,
    abort_all,
    follow_run,
    invocation_of_task,
    scope_of_task,
)
from otel_limits.bindings.model_call import (
    IDS,
    ModelCallInProgress,
    enclosing_request,
    follow_async,
    follow_parts_async,
)
from otel_limits.bindings.tool_call import ToolCallInProgress, follow_tool_async
from otel_limits.core.errors import limit_reached
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.stop_json import MARKER, stop_to_json
from otel_limits.core.usage import Usage, measured
from otel_limits.runs.calls import InFlightCall
from otel_limits.usage.text import tokens_of_text
from tests.bots import Bot, Ending, Message, Model, Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from otel_limits.core.policy import Verdict


class EndError(BaseException):
    """Ends a bot from within a model call: it is halted, or waits for a person."""

    def __init__(self, verdict: Verdict, *, asks: bool = False) -> None:
        super().__init__(verdict.reason)
        self.verdict, self.asks = verdict, asks


@dataclass(eq=False)
class BotRun(InvocationInProgress):
    """One run of a bot."""

    bot: Bot = field(kw_only=True)

    @classmethod
    @suppress_errors("binding")
    def begin(cls, bot: Bot, text: Any, *_: Any, **__: Any) -> BotRun | None:
        if (host := BOTS.host) is None or not host.is_on:
            return None
        host.prepare(has_own=False)
        policy, declined = host.policy(bot.name), None
        if bot.said and (asked := bot.said[-1].pop("asked", None)):  # answered by this text
            policy, declined = extend(policy, text), declined_verdict(asked, text)
        return cls.start(host, bot.name, policy=policy, bot=bot, verdict=declined)

    def succeed(self, result: Ending) -> Ending:
        self.reason = result.reason
        if self.is_halted and self.run.verdict is not None:  # by the model's last answer
            self._mark(result.message, self.run.verdict, synthetic=False)
            result.reason = self.run.verdict.reason
        return result

    def end_by(self, error: BaseException) -> Ending:
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
        self._mark(self.bot.said[-1], verdict, synthetic=True)
        self.is_halted = False
        if self.run.raised:
            raise limit_reached(verdict, self.run.stop(verdict.reason)) from error
        return Ending(verdict.reason, self.bot.said[-1])

    def _mark(self, message: Message, verdict: Verdict, *, synthetic: bool) -> None:
        stop = stop_to_json(self.run.stop(verdict.reason))
        message[MARKER] = {**stop, "synthetic": synthetic}


@dataclass(eq=False)
class BotCall(ModelCallInProgress):
    """One request of a bot, or of one of its tools."""

    messages: list[Message] = field(kw_only=True)
    tools: Sequence[str] = field(kw_only=True)

    @classmethod
    @suppress_errors("binding")
    def begin(cls, model: Model, messages: list[Message], tools: Sequence[str]) -> BotCall | None:
        path, run = scope_of_task(BotRun)
        if run is None:
            return None
        tokens = sum(tokens_of_text(each["text"]) for each in messages)
        call, outer = InFlightCall(type(model).__name__, tokens, "bots"), enclosing_request(run)
        asked: dict[str, Any] = {"messages": messages, "tools": tools, "outer": outer}
        if outer is not None and outer.gives_call(call):  # such as `ask` within `stream`
            return cls(run, path, [*outer.calls], model=model, is_admitted=True, **asked)
        if path is not None:
            call.id = str(next(IDS))
            path.end_turns(lambda: _results_in(messages))
        return cls(run, path, [call], model=model, can_ask=True, **asked)

    def send(self, method: Any) -> Any:
        return method(self.model, self.messages, self.tools)

    def add_note(self, note: str) -> None:
        self.messages = [*self.messages, {"by": "user", "text": note}]

    def remove_tools(self, note: str) -> None:
        self.add_note(note)
        self.tools = ()

    def note_part(self, part: Any) -> bool:
        if isinstance(part, Reply):
            self.note_answer(part)
            return True
        self.calls[0].has_content = True
        self.calls[0].parts.append(part)
        return False

    def note_answer(self, answer: Reply) -> None:
        used = measured(Usage(input=answer.tokens[0], output=answer.tokens[1]))
        self.note(self.calls[0], answer, used, answer.text)

    def text_of(self, answer: Reply) -> str:
        return answer.text

    def tools_of(self, answer: Reply) -> Iterable[tuple[str, str, object]]:
        return answer.tools

    def end_with_last(self, answer: Reply, text: str) -> None:  # noqa: ARG002
        answer.tools = ()

    def asked(self, verdict: Verdict) -> NoReturn:
        raise EndError(verdict, asks=True)

    def halted(self, verdict: Verdict, cause: BaseException | None) -> NoReturn:
        raise EndError(verdict) from cause


def _results_in(messages: list[Message]) -> dict[str, ToolAnswer]:
    return {
        each["id"]: ToolAnswer(each["text"], is_error=True)
        for each in messages
        if each["by"] == "tool"
    }


class BotTool(ToolCallInProgress):
    """One call of a tool, whose result is a text."""

    @classmethod
    @suppress_errors("binding")
    def begin(cls, bot: Bot, identity: str, name: str, argument: Any) -> BotTool | None:
        run = invocation_of_task(BotRun)
        if run is None or name not in bot.tools:  # the bot answers an unknown name
            return None
        return cls(run, run.tools.get(identity) or run.resume_tool(identity, name, argument))

    def refused(self, note: str) -> str:
        return note

    def text_of(self, result: str) -> str:
        return result

    def with_text(self, result: str, text: str) -> str:  # noqa: ARG002
        return text


class BotFramework(BaseFramework):
    """Wraps the methods of bots and their models."""

    name = distribution = requirement = "bots"
    module = "tests.bots"
    stop_reasons: Collection[str] = ("done", "paused")
    successes: Collection[str] = ("done",)

    def watch(self) -> None:
        self.patches.wrap(Bot, "run", follow_run(BotRun.begin))
        self.patches.wrap(Bot, "use", follow_tool_async(BotTool.begin))
        self.patches.watch_subclasses(Model, self._patch_model)
        for model in (Model, *subclasses_of(Model)):
            self._patch_model(model)

    def _patch_model(self, model: type) -> None:
        self.patches.wrap(model, "ask", follow_async(BotCall.begin))
        self.patches.wrap(model, "stream", follow_parts_async(BotCall.begin))

    def release(self) -> bool:
        self.patches.restore()
        abort_all(BotRun)
        return False

    def marker_of(self, result: Any) -> Mapping[str, Any] | None:
        message = getattr(result, "message", result)
        return message.get(MARKER) if isinstance(message, dict) else None

    def run_away(self, most_calls: int, observe: Callable[[], None]) -> tuple[int, str]:
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
"""The object that an entry point of its distribution names."""
