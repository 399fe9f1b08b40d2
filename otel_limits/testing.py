"""Scripted models, to test what limits do to an agent without a provider.

model = ScriptedModel(endless(uses("search")))
agent = Agent(model=model, tools=[search], callback_handler=None)
agent("go")
assert model.calls == 3
"""

from otel_limits.bindings.strands.scripted_model import (
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
