"""CPU time of a turn in a long conversation: `python -m tests.benchmarks.long_conversations`.

The provider reports no usage, so every message counts for the projected input of each call.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any, Final

from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager

from tests.benchmarks.loops import LeanModel, enable, script

MESSAGES: Final = 2_000
TURNS: Final = 20
ROUNDS: Final = 8
ZEROS: Final = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}


@tool
def look_up() -> str:
    """Look something up."""
    return "found"


def conversation(length: int) -> list[Any]:
    """Return messages as Strands stores them when the provider reports no usage."""
    metadata = {"usage": ZEROS, "metrics": {"latencyMs": 1}}
    use = {"name": "look_up", "input": {}}
    found = {"status": "success", "content": [{"text": "a line that was found " * 10}]}
    return [
        message
        for number in range(length // 4)
        for message in (
            {"role": "user", "content": [{"text": f"question {number} " * 20}]},
            {
                "role": "assistant",
                "content": [{"toolUse": {**use, "toolUseId": f"t{number}"}}],
                "metadata": metadata,
            },
            {"role": "user", "content": [{"toolResult": {**found, "toolUseId": f"t{number}"}}]},
            {"role": "assistant", "content": [{"text": "answer " * 40}], "metadata": metadata},
        )
    ]


def milliseconds_per_turn(length: int) -> float:
    """Run one invocation in a new agent with that many messages."""
    agent = Agent(
        model=LeanModel(replace(answer, usage=None) for answer in script(TURNS)),
        tools=[look_up],
        callback_handler=None,
        messages=conversation(length),
        conversation_manager=NullConversationManager(),
    )
    start = time.process_time()
    agent("go")
    return (time.process_time() - start) * 1_000 / TURNS


def main() -> None:
    """Alternate bare and limited processes and print the medians."""
    if len(sys.argv) > 1:
        if sys.argv[1] == "limited":
            enable()
        milliseconds_per_turn(8)
        sys.stdout.write(f"{milliseconds_per_turn(MESSAGES)}\n")
        return
    times: dict[str, list[float]] = {"bare": [], "limited": []}
    for _ in range(ROUNDS):
        for name, each in times.items():
            command = [sys.executable, "-m", "tests.benchmarks.long_conversations", name]
            each.append(float(subprocess.check_output(command)))
    bare, limited = (statistics.median(each) for each in times.values())
    sys.stdout.write(
        f"{MESSAGES} messages: bare {bare:.1f} ms, limited {limited:.1f} ms a turn, "
        f"{limited / bare:.3f} times the CPU time\n"
    )


if __name__ == "__main__":
    main()
