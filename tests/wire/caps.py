"""Caps at what two calls are billed, and one token or a billionth of a USD above it."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from strands import Agent, tool

from otel_limits import Limits, LimitsPlugin
from tests.wire.cases import CACHED, PLAIN, PROMPT, WRITTEN

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from strands.models import Model

    from tests.wire.providers import Provider
    from tests.wire.server import Vendor
    from tests.wire.usages import Bill

NAMES: Final = ("max_token_budget", "max_input_tokens", "max_output_tokens", "max_cost_usd")
OFFSETS: Final = {0: 2, 1: 3}
"""How far a cap is above what two calls use, and how many calls are made under it.

A count that is too low makes a third call under the first cap, one that is too high makes none
under the second.
"""
SMALLEST: Final = {"max_cost_usd": Decimal("1e-9")}
"""The meaning of 1 for limits whose unit is not a token."""


@tool
def search(query: str = "") -> str:
    """Search for a query."""
    return f"nothing found of {query}"


def names_of(provider: Provider) -> tuple[str, ...]:
    """Return the limits that can be reached: what runs locally costs nothing."""
    return NAMES[:-1] if provider.is_local else NAMES


def bill_of(provider: Provider) -> Bill:
    """Return the bill of each call, with cached tokens where the format reports them."""
    if provider.has_cache_write:
        return WRITTEN
    return CACHED if provider.has_cache and provider.name not in ("Mistral", "Writer") else PLAIN


def used_by(bill: Bill, name: str) -> Decimal:
    """Return how much of a limit a call uses."""
    used: dict[str, int | Decimal] = {
        "max_token_budget": bill.input + bill.output,
        "max_input_tokens": bill.input,
        "max_output_tokens": bill.output,
        "max_cost_usd": bill.cost,
    }
    return Decimal(used[name])


def limits_of(provider: Provider) -> Iterator[tuple[str, int, Limits]]:
    """Yield the limits with each offset."""
    for name in names_of(provider):
        twice = 2 * used_by(bill_of(provider), name)
        for offset in OFFSETS:
            cap = twice + offset * SMALLEST.get(name, Decimal(1))
            named: dict[str, Any] = {name: cap if name in SMALLEST else int(cap)}
            yield name, offset, Limits(max_turns=9, **named)


async def ask_all(vendor: Vendor, providers: Sequence[Provider]) -> dict[str, Any]:
    """Run an agent that always asks for tools under each cap; return its stop reasons and times."""
    found: dict[str, Any] = {}
    asks = ("search", json.dumps({"query": "harbour"}))
    for provider in providers:
        model = provider.make(vendor.url)
        vendor.replies[:] = [provider.reply(bill_of(provider), tool=asks)]
        found[provider.name] = {
            f"{name} {offset}": await ended(model, limits, vendor)
            for name, offset, limits in limits_of(provider)
        }
    return found


async def ended(model: Model, limits: Limits, vendor: Vendor) -> list[Any]:
    """Run an agent; return its stop reason and how many requests the vendor has received."""
    before = len(vendor.requests)
    agent = Agent(
        model=model,
        tools=[search],
        plugins=[LimitsPlugin(limits)],
        callback_handler=None,
        retry_strategy=None,
    )
    result = await agent.invoke_async(PROMPT)
    return [result.stop_reason, len(vendor.requests) - before]
