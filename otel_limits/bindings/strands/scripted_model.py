"""A scripted model for Strands."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel
from strands.models import Model

from otel_limits.bindings.script import Script

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator

    from strands.types.content import Messages
    from strands.types.streaming import StreamEvent
    from strands.types.tools import ToolSpec

    from otel_limits.bindings.script import Answer


T = TypeVar("T", bound=BaseModel)


class ScriptedModel(Model):
    """Answers from a script and records requests.

    Attributes:
        calls: Requests that reached it.
        requests: Messages of each request.
        tool_specs: Tool specifications of each request.
    """

    def __init__(
        self, script: Iterable[Answer], model_id: str = "scripted", base_url: str = ""
    ) -> None:
        """Use the answers in order; running out of them is an error of the test.

        Args:
            script: The answers.
            model_id: The ID of the model.
            base_url: Address of a vendor, whose price then applies, such as
                `https://api.openai.com/v1`. It is never called.
        """
        self.config = {"model_id": model_id, "base_url": base_url}
        self.calls = 0
        self.requests: list[Messages] = []
        self.tool_specs: list[list[ToolSpec] | None] = []
        self._script: Iterator[Answer] = Script(script)

    def update_config(self, **model_config: Any) -> None:
        """Update the configuration, as every model does."""
        self.config.update(model_config)

    def get_config(self) -> dict[str, str]:
        """Return the configuration."""
        return self.config

    async def structured_output(
        self,
        output_model: type[T],
        prompt: Messages,  # noqa: ARG002  the signature of every model
        system_prompt: str | None = None,  # noqa: ARG002
        **_: Any,
    ) -> AsyncGenerator[dict[str, T | Any], None]:
        """Answer with an empty instance of `output_model`."""
        self.calls += 1
        yield {"output": output_model.model_construct()}

    async def stream(
        self,
        messages: Messages,
        tool_specs: list[ToolSpec] | None = None,
        system_prompt: str | None = None,  # noqa: ARG002  the signature of every model
        **_: Any,
    ) -> AsyncIterable[StreamEvent]:
        """Stream the next answer of the script."""
        self.calls += 1
        self._keep(messages, tool_specs)
        answer = next(self._script)
        for event in _events(answer, self.calls):
            yield event
        if answer.error is not None:
            raise answer.error

    def _keep(self, messages: Messages, tool_specs: list[ToolSpec] | None) -> None:
        """Keep what was asked, as it was at that moment."""
        # The agent later modifies these objects.
        self.requests.append(copy.deepcopy(messages))
        self.tool_specs.append(tool_specs)


def _events(answer: Answer, call: int) -> Iterator[StreamEvent]:
    if not answer.text and not answer.tools and answer.error is not None:
        return
    yield {"messageStart": {"role": "assistant"}}
    if answer.text:
        yield {"contentBlockStart": {"start": {}}}
        yield {"contentBlockDelta": {"delta": {"text": answer.text}}}
        yield {"contentBlockStop": {}}
    for number, (name, arguments) in enumerate(answer.tools):
        use = {"name": name, "toolUseId": f"call-{call}-{number}"}
        yield {"contentBlockStart": {"start": {"toolUse": use}}}  # type: ignore[typeddict-item]
        yield {"contentBlockDelta": {"delta": {"toolUse": {"input": json.dumps(dict(arguments))}}}}
        yield {"contentBlockStop": {}}
    if answer.error is not None:
        return
    reason = answer.stop_reason or ("tool_use" if answer.tools else "end_turn")
    yield {"messageStop": {"stopReason": reason}}  # type: ignore[typeddict-item]
    if answer.usage is not None:
        usage: Any = dict(answer.usage)
        yield {"metadata": {"usage": usage, "metrics": {"latencyMs": 1}}}
