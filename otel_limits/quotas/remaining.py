"""Public query of what is left of a quota. Reserves nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from opentelemetry import baggage as current_baggage

from otel_limits.core.errors import QuotaUnavailableError
from otel_limits.core.usage import Remaining
from otel_limits.core.wording import suggestion
from otel_limits.quotas.engine import Engine
from otel_limits.quotas.quota import in_unit
from otel_limits.quotas.store import CountState, ReadCounts, StoreError, resets_at
from otel_limits.runs.registry import LIVE

if TYPE_CHECKING:
    from otel_limits.quotas.client import StoreClient
    from otel_limits.quotas.keys import Key
    from otel_limits.quotas.quota import Quota


def remaining(
    name: str,
    *,
    agent: str | None = None,
    model: str | None = None,
    baggage: Mapping[str, str] | None = None,
    attributes: Mapping[str, object] | None = None,
) -> Remaining:
    """Return what is left of a quota, for the key of a model call.

    Waits for the store for at most `OTEL_LIMITS_QUOTA_STORE_TIMEOUT`. In an event loop, use
    `remaining_async`.

    Args:
        name: Name of the quota in the policy file.
        agent: Name of the agent, if the quota's key includes it.
        model: Model ID, if the quota's key includes it.
        baggage: Values to use instead of the current baggage.
        attributes: Trace attributes of the agent.

    Raises:
        ValueError: No such quota is enforced, or a part of its key is missing.
        QuotaUnavailableError: The store is unavailable.
    """
    question = _question(name, agent, model, baggage, attributes)
    try:
        state = question.client.ask_blocking(question.look)
    except StoreError as error:
        raise question.unanswered() from error
    return question.answer(state)


async def remaining_async(
    name: str,
    *,
    agent: str | None = None,
    model: str | None = None,
    baggage: Mapping[str, str] | None = None,
    attributes: Mapping[str, object] | None = None,
) -> Remaining:
    """Return what is left of a quota without blocking the event loop."""
    question = _question(name, agent, model, baggage, attributes)
    try:
        state = await question.client.ask(question.look)
    except StoreError as error:
        raise question.unanswered() from error
    return question.answer(state)


class _Question(NamedTuple):
    """A query for the remainder of a quota."""

    client: StoreClient
    quota: Quota
    key: Key
    look: ReadCounts

    def answer(self, state: CountState) -> Remaining:
        """Put the answer into the quota's unit."""
        figures, ((count, _),) = self.quota.figures(state), self.look.counts
        now = self.client.now()
        has_window = self.quota.unit != "concurrency"
        return Remaining(
            quota=self.quota.name,
            key=self.key.shown,
            unit=figures.unit,
            limit=figures.limit,
            used=figures.used,
            reserved=figures.reserved,
            left=figures.left,
            resets_at=resets_at(count, state, now) if has_window else now,
        )

    def unanswered(self) -> QuotaUnavailableError:
        """Return the error for an unavailable store."""
        return QuotaUnavailableError(0, in_unit(self.quota.unit, self.look.counts[0][1]))


def _question(
    name: str,
    agent: str | None,
    model: str | None,
    baggage: Mapping[str, str] | None,
    attributes: Mapping[str, object] | None,
) -> _Question:
    gate = LIVE.observers.gate
    held = {quota.name: quota for quota in gate.quotas()} if isinstance(gate, Engine) else {}
    if not isinstance(gate, Engine) or name not in held:
        known = ", ".join(held) or "none; set OTEL_LIMITS_POLICY to a file with quotas"
        hint = suggestion(name, held, f"Known quotas: {known}.")
        raise ValueError(f"No quota named {name!r} is enforced. {hint}")
    quota = held[name]
    given = {"agent": agent, "model": model}
    for source in quota.key.sources:
        if source in given and given[source] is None:
            raise ValueError(f"Quota {name!r} has one count per {source}: pass {source}=….")

    def look_up(source: str) -> object:
        kind, _, rest = source.partition(".")
        if kind == "baggage":
            return current_baggage.get_baggage(rest) if baggage is None else baggage.get(rest)
        return given[source] if source in given else (attributes or {}).get(rest)

    key = quota.key.key(name, look_up)
    count, amount = quota.count(key, gate.client.now()), quota.amount_of(key, look_up)
    return _Question(gate.client, quota, key, ReadCounts(((count, amount),)))
