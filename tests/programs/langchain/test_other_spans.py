"""Model calls count once, and have one span, with every instrumentation of LangChain."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.paths import SCRIPTS

PROGRAM = SCRIPTS / "traced_graphs.py"

INSTRUMENTATIONS = {
    "OpenInference": "openinference.instrumentation.langchain:LangChainInstrumentor",
    "OpenLLMetry": "opentelemetry.instrumentation.langchain:LangchainInstrumentor",
}


# In a separate process: an instrumentation stays active after it was removed.
@pytest.mark.parametrize("instrumentation", INSTRUMENTATIONS.values(), ids=[*INSTRUMENTATIONS])
def test_traced_calls_count_once(instrumentation: str) -> None:
    """Two counts of one call would halve every budget of a traced program.

    These instrumentations choose the parents of their spans, so a call of an agent in a branch is
    below the span of the enclosing graph.
    """
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), instrumentation],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout.splitlines()[-1])
    assert seen["turns"] == 14  # twice the limit of a tree
    assert seen["counted"] == ["helper"] * seen["requests"]
    assert not any(name.startswith("chat ") for name in seen["spans"])
    assert sum("ScriptedChatModel" in name for name in seen["spans"]) == seen["requests"]
