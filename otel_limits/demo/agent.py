"""The demo's program: a plain Strands agent that waits for a job. It knows nothing of limits.

Usage: python -m otel_limits.demo.agent JOBS_URL

Takes one errand per line of standard input, as JSON, and writes one result per line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any
from urllib.request import urlopen

from strands import Agent, tool
from strands.hooks import BeforeModelCallEvent
from strands.models.llamacpp import LlamaCppModel

SYSTEM_PROMPT = "You watch jobs. Look with the tool job_state, again and again, until one is done."

SECONDS_PER_CALL = 120.0
"""What a model on a small machine may take to answer."""


ENDED_BY_DEMO = "The demo ended this run: it asked the model often enough."


@tool
def job_state(job: str) -> str:
    """Look at the state of a job: pending or done.

    Args:
        job: Name of the job.
    """
    # Over HTTP like a real job server: the runaway is one that looks at something outside.
    with urlopen(f"{sys.argv[1]}/{job}", timeout=10) as answer:  # noqa: S310  the demo's own http
        text: str = answer.read().decode()
    return text


def run_errand(errand: Mapping[str, Any]) -> dict[str, Any]:
    """Send an agent on an errand, and return what came of it."""
    model = LlamaCppModel(
        base_url=errand["base_url"], model_id=errand["model"], timeout=SECONDS_PER_CALL
    )
    if errand["api_key"] is not None:
        # The class has no parameter for a key, as llama.cpp's server seldom wants one.
        model.client.headers["Authorization"] = f"Bearer {errand['api_key']}"
    agent = Agent(
        name=errand["agent"],
        model=model,
        tools=[job_state],
        system_prompt=SYSTEM_PROMPT,
        callback_handler=None,
    )
    # Here and not by a limit: the runs without any have to end, too.
    is_out_of_calls = bound(agent, errand["most_calls"])
    result = agent(errand["prompt"])
    return {
        "stop_reason": result.stop_reason,
        "message": result.message,
        "usage": result.metrics.accumulated_usage,
        "out_of_calls": is_out_of_calls(),
    }


def bound(agent: Agent, most_calls: int) -> Callable[[], bool]:
    """Bound the demo: the job is never found done where the model cannot use the tool.

    Returns:
        What tells whether it was this that ended the agent.
    """
    refused: list[BeforeModelCallEvent] = []
    # An iterator, as `next` on it is one step: a retry may come in while another call is under way.
    left = iter(range(most_calls))

    def count(event: BeforeModelCallEvent) -> None:
        # Cancelled and not raised: the run ends as an agent does, with a result that can be shown.
        if next(left, None) is None:
            event.cancel = ENDED_BY_DEMO
            refused.append(event)

    agent.add_hook(count, BeforeModelCallEvent)
    return lambda: bool(refused)


if __name__ == "__main__":
    # One process for several errands, so that one scrape has the counters of all of them.
    for line in sys.stdin:
        print(json.dumps(run_errand(json.loads(line))), flush=True)  # noqa: T201  its output
