"""A minimal agent framework and its binding to otel-limits, for tests only."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from opentelemetry import trace

from otel_limits.bindings.path import Path
from otel_limits.core.stop_json import stop_from_json, stop_to_json
from otel_limits.core.usage import Usage, measured
from otel_limits.otel.span_names import SpanNames
from otel_limits.runs.calls import InFlightCall
from otel_limits.runs.tree import CURRENT

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from otel_limits.bindings.framework import Gap, Host
    from otel_limits.core.events import Stop
    from otel_limits.core.policy import Verdict


Ending = dict[str, Any]
"""End of a run: a reason and the last message."""


@dataclass
class Bot:
    """The framework: calls a model until its answer is `done`."""

    name: str
    ask: Callable[[int], tuple[str, int, int]]
    """Takes the number of the step; returns a text and its input and output tokens."""
    said: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> Ending:
        """Return the last message and the reason for the end."""
        with trace.get_tracer("bots").start_as_current_span(f"bot {self.name}") as span:
            return LISTENER.on_run(self, span, self._steps)

    def _steps(self) -> Ending:
        while True:
            with trace.get_tracer("bots").start_as_current_span("step"):
                text = LISTENER.on_step(self)
            if text == "done":
                return {"reason": "done", "message": self.said[-1]}


class Listener:
    """The framework's hooks; by default, they do nothing."""

    def on_run(self, _bot: Bot, _span: trace.Span, go: Callable[[], Ending]) -> Ending:
        """Wrap a run."""
        return go()

    def on_step(self, bot: Bot) -> str:
        """Wrap a step."""
        text, *_ = bot.ask(len(bot.said))
        bot.said.append({"text": text})
        return text


LISTENER: Listener = Listener()


class HaltError(Exception):
    """Ends the steps of a bot."""

    def __init__(self, verdict: Verdict) -> None:
        """Keep why."""
        super().__init__(verdict.reason)
        self.verdict = verdict


class BotFramework(Listener):
    """The whole binding of that framework."""

    name = "bots"
    module = "tests.second_framework"
    distribution = "bots"
    packages: Collection[str] = ("tests",)
    requirement = "bots"
    needed: Mapping[str, Sequence[str]] = MappingProxyType({})
    importers: Sequence[str] = ()
    without = ""
    parts: Collection[str] = ()
    spans: SpanNames | None = SpanNames(scope="bots", agent="bot", cycle="step")
    stop_reasons: Collection[str] = ("done",)
    successes: Collection[str] = ("done",)
    host: Host | None = None

    def gaps(self) -> Sequence[Gap]:
        """Return no gap."""
        return ()

    def gaps_of(self, part: str) -> Sequence[Gap]:  # noqa: ARG002  it has none
        """Return no gap."""
        return ()

    def watch(self) -> None:
        """Install this listener."""
        globals()["LISTENER"] = self

    def renew(self) -> None:
        """Do nothing: this listener patches no class."""

    def release(self) -> bool:
        """Remove this listener. No bot can have its own limits."""
        globals()["LISTENER"] = Listener()
        return False

    def mark(self, message: Any, stop: Stop, *, synthetic: bool) -> None:
        """Write `stop` next to the text."""
        message["stopped"] = {**stop_to_json(stop), "synthetic": synthetic}

    def marker_of(self, result: Any) -> Mapping[str, Any] | None:
        """Return the marker written by `mark`."""
        message = result.get("message", result) if isinstance(result, dict) else {}
        return message.get("stopped")

    def stops_of(self, result: Any) -> list[Stop]:
        """Return the stop in a marker."""
        marker = self.marker_of(result)
        return [] if marker is None else [stop_from_json(marker)]

    def run_away(self, most_calls: int, observe: Callable[[], None]) -> tuple[int, str]:
        """Run a bot that answers after `most_calls` calls."""
        calls = 0

        def ask(step: int) -> tuple[str, int, int]:
            nonlocal calls
            calls += 1
            observe()
            return ("done" if step == most_calls else "thought"), 10, 5

        reason = Bot("runaway", ask).run()["reason"]
        return calls, reason

    def on_run(self, bot: Bot, span: trace.Span, go: Callable[[], Ending]) -> Ending:
        """Track a run from its start to its end or halt."""
        assert self.host is not None
        ids = span.get_span_context()
        run = self.host.runs.start(bot.name, self.host.policy(bot.name), ids.trace_id, ids.span_id)
        run.state = path = Path(run)
        run.cancel = path.cancel  # for deadlines and kills
        run.time_limit.start()
        token = CURRENT.set(run)
        try:
            ending = go()
        except HaltError as halt:
            ending = self._halted(bot, path, halt.verdict)
        finally:
            CURRENT.reset(token)
        run.finish(ending["reason"])
        return ending

    def on_step(self, bot: Bot) -> str:
        """Check limits and quotas, call the model, count."""
        run: Any = CURRENT.get()
        path, call = run.state, InFlightCall("bot-model", 1, "bots")
        refusal = path.admit_blocking(call, attributes={})
        if refusal is not None:
            raise HaltError(refusal.verdict)
        run.calls.open(call)
        try:
            text, tokens_in, tokens_out = bot.ask(len(bot.said))
        except Exception as error:
            path.settle_blocking(call, error)
            raise
        call.record = measured(Usage(input=tokens_in, output=tokens_out))
        path.settle_blocking(call)
        bot.said.append({"text": text})
        run.turn()
        return text

    def _halted(self, bot: Bot, path: Path, verdict: Verdict) -> Ending:
        path.run.halt(verdict, "halted")
        bot.said.append({"text": path.text_of(verdict)})
        self.mark(bot.said[-1], path.run.stop(verdict.reason), synthetic=True)
        return {"reason": verdict.reason, "message": bot.said[-1]}
