"""Graphs are limited after LangChain was imported again, as programs that reload code do."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import otel_limits

otel_limits.enable(max_turns=2)

def run():
    from langchain.agents import create_agent
    from otel_limits.testing import ScriptedChatModel, endless, uses

    def search() -> str:
        "Search."
        return "nothing"

    model = ScriptedChatModel(endless(uses("search")))
    agent = create_agent(model, [search], name="boss")
    state = agent.invoke({"messages": "go"}, {"recursion_limit": 60})
    print(model.calls, otel_limits.stop_of(state).turns)

run()
for name in list(sys.modules):
    if name.partition(".")[0] in ("langchain", "langchain_core", "langgraph"):
        del sys.modules[name]
run()
otel_limits.disable()
"""


def test_graph_of_a_second_import_is_limited() -> None:
    """Its classes are new, so nothing of the first import recognizes them."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "2 2\n2 2\n"), ended.stderr
