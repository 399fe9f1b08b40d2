"""Scripted models, to test what limits do to an agent without a provider.

model = ScriptedModel(endless(uses("search")))
agent = Agent(model=model, tools=[search], callback_handler=None)
agent("go")
assert model.calls == 3
"""

from otel_limits.bindings.installed import require
from otel_limits.bindings.strands.strands_framework import STRANDS

require(STRANDS, "otel_limits.testing")

from otel_limits.bindings.strands.scripted_model import (  # noqa: E402
    Answer,
    ScriptedModel,
    endless,
    fails,
    only,
    says,
    tokens,
    uses,
)

__all__ = ["Answer", "ScriptedModel", "endless", "fails", "only", "says", "tokens", "uses"]
