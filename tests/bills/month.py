"""A month of agents at four vendors, by a simulated wall clock.

`python -m tests.bills.month FOLDER` writes the ledger of the agents, and the calls on the vendors'
bills as `calls.pickle`.
"""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.bills.billed import BilledCall
    from tests.bills.billing_server import Biller

BEGIN: Final = datetime(2026, 10, 1, tzinfo=timezone.utc).timestamp()
DAY: Final = 86_400.0
DAYS: Final = 31


class WallClock:
    """The time of day, which the program sets."""

    def __init__(self) -> None:
        """Begin at the month's first second."""
        self.now = BEGIN

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


CLOCK: Final = WallClock()
if __name__ == "__main__":
    # Before anything reads it: classes of events have the function as a default.
    time.time = CLOCK

import asyncio  # noqa: E402
import functools  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import pickle  # noqa: E402
import ssl  # noqa: E402
import sys  # noqa: E402
import urllib.request  # noqa: E402
from pathlib import Path  # noqa: E402

MODELS: Final = (
    ("openai", "gpt-4o"),
    ("anthropic", "claude-sonnet-4-5"),
    ("openrouter", "openai/gpt-4o-mini"),
    ("litellm", "smart"),
    ("openai", "gpt-4o-mini"),
    ("anthropic", "claude-haiku-4-5"),
)
UNLISTED: Final = ("openai", "gpt-next-preview")
POLICY: Final = {"models": {"smart": {"as": "openai/gpt-4o-mini"}}}
"""The name that the gateway offers; its operator knows the model."""
UNPRICED, SILENT, LOST = 5, 2, 3
"""Calls of each kind in a month with differences."""


def main(folder: Path, calls: int, *, has_differences: bool) -> None:
    """Simulate a month of this many calls."""
    policy = folder / "policy.yaml"
    policy.write_text(json.dumps(POLICY), encoding="utf-8")
    os.environ |= {
        "OTEL_LIMITS_LEDGER": str(folder / "ledger.db"),
        "OTEL_LIMITS_POLICY": str(policy),
    }
    # Nothing here is encrypted, and each client would read the certificates of all authorities.
    vars(ssl)["create_default_context"] = functools.cache(ssl.create_default_context)

    from strands import tool

    import otel_limits
    from tests.bills.billing_server import billing

    @tool
    def look() -> str:
        """Look at the harbour."""
        return "three ships"

    otel_limits.enable(otel_limits.Limits(max_turns=9))
    with billing(CLOCK, CLOCK.wait) as biller:
        # In one event loop, as clients keep their connections.
        asyncio.run(simulate(biller, calls, look, has_differences=has_differences))
        billed: Sequence[BilledCall] = biller.calls
    otel_limits.disable()
    (folder / "calls.pickle").write_bytes(pickle.dumps(billed))


async def simulate(biller: Biller, calls: int, look: Any, *, has_differences: bool) -> None:
    """Make the calls of the month; those with a difference first, each kind on its day."""
    from tests.bills.billing_server import TURNS

    if has_differences:
        calls -= UNPRICED + SILENT + LOST
        at_noon(3)
        await run_agents(biller, [UNLISTED] * UNPRICED)
        at_noon(5)
        biller.silent = SILENT
        await run_agents(biller, [MODELS[0]] * SILENT)
        at_noon(7)
        for _ in range(LOST):
            call_directly(biller, "claude-sonnet-4-5")
    # Each model at another hour each time.
    agents = [MODELS[(n + n // len(MODELS)) % len(MODELS)] for n in range(calls // TURNS)]
    await run_agents(biller, agents, [look], is_spread=True)
    await run_agents(biller, [MODELS[0]] * (calls % TURNS))


def at_noon(day: int) -> None:
    """Set the clock to the noon of a day of the month."""
    CLOCK.now = BEGIN + day * DAY + DAY / 2


async def run_agents(
    biller: Biller,
    models: Sequence[tuple[str, str]],
    tools: Sequence[Any] = (),
    *,
    is_spread: bool = False,
) -> None:
    """Run an agent with each model, over all days and hours of the month if `is_spread`."""
    from strands import Agent

    made = {each: model_of(biller, *each) for each in dict.fromkeys(models)}
    for number, each in enumerate(models):
        if is_spread:
            CLOCK.now = BEGIN + (number + number % 7 / 7) * (DAYS * DAY / len(models))
        agent = Agent(
            model=made[each],
            name=each[0],
            callback_handler=None,
            retry_strategy=None,
            tools=[*tools],
        )
        await agent.invoke_async("Which ships are in the harbour?")


def model_of(biller: Biller, vendor: str, model: str) -> Any:
    """Make a model with the vendor's own client."""
    from openai import AsyncOpenAI
    from strands.models.anthropic import AnthropicModel
    from strands.models.openai import OpenAIModel

    from tests.bills.billing_server import HOSTS

    host = next(host for host, name in HOSTS.items() if name == vendor)
    client: dict[str, Any] = {"api_key": "x", "max_retries": 0}
    address = f"http://{host}:{biller.port}"
    if vendor == "anthropic":
        return AnthropicModel(
            client_args={**client, "base_url": address}, model_id=model, max_tokens=1_000
        )
    # One client for all calls, which takes half of the time.
    shared = AsyncOpenAI(**client, base_url=f"{address}/v1")
    return OpenAIModel(client=shared, model_id=model)


def call_directly(biller: Biller, model: str) -> None:
    """Call Anthropic without an agent, as a script without limits does."""
    request = urllib.request.Request(
        f"http://api.anthropic.com:{biller.port}/v1/messages",
        json.dumps({"model": model, "messages": []}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        answer.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), has_differences="differences" in sys.argv)
