"""The whole binding of a small framework, `tests.bots`, as its authors would write it."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from otel_limits.frameworks import (
    MARKER,
    BaseFramework,
    InFlightCall,
    InvocationInProgress,
    ModelCallInProgress,
    ScriptedRun,
    ToolAnswer,
    ToolCallInProgress,
    Usage,
    follow_async,
    follow_parts_async,
    follow_run_async,
    follow_tool_async,
    measured,
    tokens_of_text,
)
from tests.bots import Bot, Ending, Message, Model, Reply

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence


@dataclass(eq=False)
class BotRun(InvocationInProgress):
    """One run of a bot."""

    bot: Bot = field(kw_only=True)

    @classmethod
    def begin(cls, bot: Bot, text: Any, *_: Any, **__: Any) -> BotRun | None:
        asked = bot.said[-1].pop("asked", None) if bot.said else None  # answered by this text
        return cls.start_if_on(BOTS.host, bot.name, asked=asked, answer=text, given=text, bot=bot)

    def reason_of(self, result: Ending) -> str:
        return result.reason

    def result_of_halt(self, text: str) -> Ending:
        self.bot.said.append({"by": "bot", "text": text})
        return Ending("done", self.bot.said[-1])

    def result_of_question(self, asked: Mapping[str, Any]) -> Ending:
        self.bot.said.append({"by": "bot", "text": asked["question"], "asked": asked})
        return Ending("paused", self.bot.said[-1])

    def with_marker(self, result: Ending, marker: Mapping[str, Any]) -> Ending:
        result.message[MARKER] = marker
        return Ending(marker["reason"], result.message)


@dataclass(eq=False)
class BotCall(ModelCallInProgress):
    """One request of a bot, or of one of its tools."""

    messages: list[Message] = field(kw_only=True)
    tools: Sequence[str] = field(kw_only=True)

    @classmethod
    def begin(cls, model: Model, messages: list[Message], tools: Sequence[str]) -> BotCall | None:
        return cls.start(BotRun, model=model, messages=messages, tools=tools)

    def describe(self) -> InFlightCall:
        tokens = sum(tokens_of_text(each["text"]) for each in self.messages)
        return InFlightCall(type(self.model).__name__, tokens, "bots")

    def tool_results(self) -> dict[str, ToolAnswer]:
        results = (each for each in self.messages if each["by"] == "tool")
        return {each["id"]: ToolAnswer(each["text"], is_error=True) for each in results}

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
        else:
            self.note_text(part)
        return isinstance(part, Reply)

    def note_answer(self, answer: Reply) -> None:
        used = measured(Usage(input=answer.tokens[0], output=answer.tokens[1]))
        self.note(self.calls[0], answer, used, answer.text)

    def text_of(self, answer: Reply) -> str:
        return answer.text

    def tools_of(self, answer: Reply) -> Iterable[tuple[str, str, object]]:
        return answer.tools

    def end_with_last(self, answer: Reply, text: str) -> None:  # noqa: ARG002
        answer.tools = ()


class BotTool(ToolCallInProgress):
    """One call of a tool, whose result is a text."""

    @classmethod
    def begin(cls, bot: Bot, identity: str, name: str, argument: Any) -> BotTool | None:
        if name not in bot.tools:  # the bot answers an unknown name
            return None
        return cls.start(BotRun, identity, name, argument)


class BotFramework(BaseFramework):
    """Wraps the methods of bots and their models."""

    invocation = BotRun
    stop_reasons: Collection[str] = ("done", "paused")
    successes: Collection[str] = ("done",)

    def watch(self) -> None:
        self.patches.wrap(Bot, "run", follow_run_async(BotRun.begin))
        self.patches.wrap(Bot, "use", follow_tool_async(BotTool.begin))
        ask, stream = follow_async(BotCall.begin), follow_parts_async(BotCall.begin)
        self.patches.wrap_all(Model, {"ask": ask, "stream": stream})

    def marker_of(self, result: Any) -> Mapping[str, Any] | None:
        message = getattr(result, "message", result)
        return message.get(MARKER) if isinstance(message, dict) else None

    def run_script(self, run: ScriptedRun) -> tuple[int, str]:
        script, asked = iter(run.script), itertools.count(1)

        class Scripted(Model):
            async def ask(self, messages: Any, tools: Any) -> Reply:  # noqa: ARG002
                number, answer = next(asked), next(script)
                return Reply(answer.text, [(str(number), name, None) for name, _ in answer.tools])

        def tool(name: str) -> Any:
            return lambda _: asyncio.to_thread(run.tools[name])

        tools = {name: tool(name) for name in run.tools}
        ending = asyncio.run(Bot(run.agent, Scripted(), tools).run("go"))
        return next(asked) - 1, ending.reason


BOTS = BotFramework()
"""The object that the entry point of its distribution names."""
