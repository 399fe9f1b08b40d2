"""An agent framework of a few lines, and how otel-limits would follow it, for tests alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opentelemetry import trace

from otel_limits.bindings.framework import SpanNames
from otel_limits.core.messages import halt_text, stop_to_json
from otel_limits.core.usage import Usage, measured
from otel_limits.runs.calls import InFlightCall
from otel_limits.runs.tree import CURRENT

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from otel_limits.bindings.framework import Gap, Host
    from otel_limits.core.events import Stop
    from otel_limits.runs.run import Run


Ending = dict[str, Any]
"""How a run ended: a reason, and the message that was said last."""


@dataclass
class Bot:
    """The framework: asks a model until it says that it is done."""

    name: str
    ask: Callable[[int], tuple[str, int, int]]
    """Takes the number of the step; returns a text, and how many tokens it took in and out."""
    said: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> Ending:
        """Return what was said last, and why nothing more was."""
        with trace.get_tracer("bots").start_as_current_span(f"bot {self.name}") as span:
            return LISTENER.on_run(self, span, self._steps)

    def _steps(self) -> Ending:
        while True:
            with trace.get_tracer("bots").start_as_current_span("step"):
                text = LISTENER.on_step(self)
            if text == "done":
                return {"reason": "done", "message": self.said[-1]}


class Listener:
    """What the framework offers to those who follow it: by default, nothing happens."""

    def on_run(self, _bot: Bot, _span: trace.Span, go: Callable[[], Ending]) -> Ending:
        """Stand around a run."""
        return go()

    def on_step(self, bot: Bot) -> str:
        """Stand around a step."""
        text, *_ = bot.ask(len(bot.said))
        bot.said.append({"text": text})
        return text


LISTENER: Listener = Listener()


class HaltError(Exception):
    """Ends the steps of a bot."""


class BotFramework(Listener):
    """The whole binding of that framework."""

    name = "bots"
    module = "tests.second_framework"
    parts: Collection[str] = ()
    spans = SpanNames(scope="bots", agent="bot", cycle="step")
    stop_reasons: Collection[str] = ("done",)
    successes: Collection[str] = ("done",)
    host: Host | None = None

    def gaps(self) -> Sequence[Gap]:
        """Miss nothing."""
        return ()

    def gaps_of(self, part: str) -> Sequence[Gap]:  # noqa: ARG002  it has none
        """Miss nothing."""
        return ()

    def watch(self) -> None:
        """Be what the framework calls."""
        globals()["LISTENER"] = self

    def release(self) -> bool:
        """Have it call nobody; no bot can be given limits of its own."""
        globals()["LISTENER"] = Listener()
        return False

    def mark(self, message: Any, stop: Stop, *, synthetic: bool) -> None:
        """Write `stop` beside the text."""
        message["stopped"] = {**stop_to_json(stop), "synthetic": synthetic}

    def marker_of(self, result: Any) -> Mapping[str, Any] | None:
        """Read it back."""
        message = result.get("message", result) if isinstance(result, dict) else {}
        return message.get("stopped")

    def put_stop(self, ending: Any, reason: str) -> None:
        """Name the reason."""
        ending["reason"] = reason

    def on_run(self, bot: Bot, span: trace.Span, go: Callable[[], Ending]) -> Ending:
        """Follow a run from its beginning to its end, or to its halt."""
        assert self.host is not None
        ids = span.get_span_context()
        run = self.host.runs.start(bot.name, self.host.policy(bot.name), ids.trace_id, ids.span_id)
        token = CURRENT.set(run)
        try:
            ending = go()
        except HaltError:
            ending = self._halted(bot, run)
        finally:
            CURRENT.reset(token)
        run.finish(ending["reason"])
        return ending

    def on_step(self, bot: Bot) -> str:
        """Judge, call, count."""
        run: Any = CURRENT.get()
        call = InFlightCall("bot-model", 1, "bots")
        if run.calls.admit(call, turn=True) is not None:
            raise HaltError
        run.calls.open(call)
        text, tokens_in, tokens_out = bot.ask(len(bot.said))
        run.calls.settle(call, measured(Usage(input=tokens_in, output=tokens_out)))
        bot.said.append({"text": text})
        run.turn()
        return text

    def _halted(self, bot: Bot, run: Run) -> Ending:
        verdict = run.check_limits()
        assert verdict is not None
        run.halt(verdict, "halted")
        bot.said.append({"text": halt_text(verdict, bot.name)})
        self.mark(bot.said[-1], run.stop(verdict.reason), synthetic=True)
        ending = {"reason": "", "message": bot.said[-1]}
        self.put_stop(ending, verdict.reason)
        return ending
