"""Scripted models and a clock, to test what limits do to an agent without a provider.

For Strands:

    model = ScriptedModel(endless(uses("search")))
    agent = Agent(model=model, tools=[search], callback_handler=None)
    agent("go")
    assert model.calls == 3

For LangChain, with `create_agent(ScriptedChatModel(endless(uses("search"))), [search])`. For the
OpenAI Agents SDK, with `Agent("boss", model=ScriptedAgentsModel(endless(uses("search"))))`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from otel_limits.bindings.known import is_there, require
from otel_limits.bindings.langchain.langchain_framework import LANGCHAIN
from otel_limits.bindings.openai_agents.openai_agents_framework import OPENAI_AGENTS
from otel_limits.bindings.script import Answer, endless, fails, only, says, tokens, uses
from otel_limits.bindings.strands.strands_framework import STRANDS
from otel_limits.runs.clock import FakeTime

if TYPE_CHECKING:
    from otel_limits.bindings.langchain.scripted_chat_model import ScriptedChatModel
    from otel_limits.bindings.openai_agents.scripted_agents_model import ScriptedAgentsModel
    from otel_limits.bindings.strands.scripted_model import ScriptedModel

__all__ = [
    "Answer",
    "FakeTime",
    "ScriptedAgentsModel",
    "ScriptedChatModel",
    "ScriptedModel",
    "endless",
    "fails",
    "only",
    "says",
    "tokens",
    "uses",
]


MODELS = {
    "ScriptedModel": (STRANDS, "strands.scripted_model"),
    "ScriptedChatModel": (LANGCHAIN, "langchain.scripted_chat_model"),
    "ScriptedAgentsModel": (OPENAI_AGENTS, "openai_agents.scripted_agents_model"),
}


if not TYPE_CHECKING:
    # `import *` imports each of these.
    __all__ = [name for name in __all__ if name not in MODELS or is_there(MODELS[name][0])]


def __getattr__(name: str) -> Any:
    """Import a model on first use, as only one framework may be installed."""
    if name not in MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    framework, module = MODELS[name]
    require(framework, f"otel_limits.testing.{name}")
    return getattr(import_module(f"otel_limits.bindings.{module}"), name)
