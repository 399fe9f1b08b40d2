"""The demo's program: a plain Strands agent that polls a job. Its code contains no limits.

Usage: python -m otel_limits.demo.agent JOBS_URL

Reads one task per line from standard input, as JSON, and writes one result per line.
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

SYSTEM_PROMPT = "You monitor jobs. Call the tool job_state again and again until the job is done."

SECONDS_PER_CALL = 120.0
"""A local model on a small machine is slow."""

ENDED_BY_DEMO = "The demo ended this run after its maximum number of model calls."


@tool
def job_state(job: str) -> str:
    """Return the state of a job: pending or done.

    Args:
        job: Name of the job.
    """
    # Over HTTP, like a real job server.
    with urlopen(f"{sys.argv[1]}/{job}", timeout=10) as answer:  # noqa: S310  the demo's own http
        text: str = answer.read().decode()
    return text


def run_agent(task: Mapping[str, Any]) -> dict[str, Any]:
    """Run an agent on a task and return its result."""
    model = LlamaCppModel(
        base_url=task["base_url"], model_id=task["model"], timeout=SECONDS_PER_CALL
    )
    if task["api_key"] is not None:
        # LlamaCppModel has no parameter for an API key.
        model.client.headers["Authorization"] = f"Bearer {task['api_key']}"
    agent = Agent(
        name=task["agent"],
        model=model,
        tools=[job_state],
        system_prompt=SYSTEM_PROMPT,
        callback_handler=None,
    )
    # Not an otel-limits limit, because runs without limits must also end.
    is_out_of_calls = limit_calls(agent, task["max_calls"])
    result = agent(task["prompt"])
    return {
        "stop_reason": result.stop_reason,
        "message": result.message,
        "usage": result.metrics.accumulated_usage,
        "out_of_calls": is_out_of_calls(),
    }


def limit_calls(agent: Agent, max_calls: int) -> Callable[[], bool]:
    """End the run after a number of model calls, even if the model cannot use the tool.

    Returns:
        A function that returns whether this ended the run.
    """
    refused: list[BeforeModelCallEvent] = []
    # `next` is atomic: a retry may start while another call is in flight.
    left = iter(range(max_calls))

    def count(event: BeforeModelCallEvent) -> None:
        # Canceling, unlike raising, ends the run with a result.
        if next(left, None) is None:
            event.cancel = ENDED_BY_DEMO
            refused.append(event)

    agent.add_hook(count, BeforeModelCallEvent)
    return lambda: bool(refused)


if __name__ == "__main__":
    # One process for several tasks, so one scrape contains the counters of all.
    for line in sys.stdin:
        print(json.dumps(run_agent(json.loads(line))), flush=True)  # noqa: T201  its output
