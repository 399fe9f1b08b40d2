"""An agent of an environment without otel-limits, whose model calls a tool 22 times.

Prints the number of model calls.
"""

from __future__ import annotations

from typing import Any

from strands import Agent, tool
from strands.models import Model

CALLS = 23


class Looping(Model):  # type: ignore[misc, unused-ignore]
    """Calls a tool until its script ends."""

    calls = 0

    def update_config(self, **_: Any) -> None:
        """Ignore changes."""

    def get_config(self) -> dict[str, str]:
        """Return a configuration."""
        return {"model_id": "looping"}

    def structured_output(self, *_: Any, **__: Any) -> Any:
        """Fail, as it is not used."""
        raise NotImplementedError

    async def stream(self, *_: Any, **__: Any) -> Any:
        """Answer with a tool call, and at last with an empty text."""
        self.calls += 1
        yield {"messageStart": {"role": "assistant"}}
        start: dict[str, Any] = {}
        if self.calls < CALLS:
            start = {"toolUse": {"name": "search", "toolUseId": f"search-{self.calls}"}}
        yield {"contentBlockStart": {"start": start}}
        if start:
            yield {"contentBlockDelta": {"delta": {"toolUse": {"input": "{}"}}}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "tool_use" if start else "end_turn"}}


@tool
def search() -> str:
    """Search."""
    return "nothing found"


model = Looping()
Agent(model=model, tools=[search], callback_handler=None)("go")
print(model.calls)  # noqa: T201  its output
