"""The demo's program: a plain Strands agent that waits for a job. It knows nothing of limits.

Usage: python -m otel_limits.demo.agent JOBS_URL

Takes one errand per line of standard input, as JSON, and writes one result per line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any
from urllib.request import urlopen

from strands import Agent, tool
from strands.models.llamacpp import LlamaCppModel

SYSTEM_PROMPT = "You watch jobs. Look with the tool job_state, again and again, until one is done."

SECONDS_PER_CALL = 120.0
"""What a model on a small machine may take to answer."""


@tool
def job_state(job: str) -> str:
    """Look at the state of a job: pending or done.

    Args:
        job: Name of the job.
    """
    with urlopen(f"{sys.argv[1]}/{job}", timeout=10) as answer:  # noqa: S310  the demo's own http
        text: str = answer.read().decode()
    return text


def run_errand(errand: Mapping[str, str]) -> dict[str, Any]:
    """Send an agent on an errand, and return what came of it."""
    model = LlamaCppModel(
        base_url=errand["base_url"], model_id=errand["model"], timeout=SECONDS_PER_CALL
    )
    agent = Agent(
        name=errand["agent"],
        model=model,
        tools=[job_state],
        system_prompt=SYSTEM_PROMPT,
        callback_handler=None,
    )
    result = agent(errand["prompt"])
    return {
        "stop_reason": result.stop_reason,
        "message": result.message,
        "usage": result.metrics.accumulated_usage,
    }


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run_errand(json.loads(line))), flush=True)  # noqa: T201  its output
