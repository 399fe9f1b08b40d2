"""Queries of quotas: what is left of one, and the usage of every key. They reserve nothing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from heapq import nsmallest
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from opentelemetry import baggage as current_baggage

from otel_limits.core.errors import QuotaUnavailableError
from otel_limits.core.limits import CONVERSATION_PREFIX
from otel_limits.core.secrets import quote_value
from otel_limits.core.usage import Remaining, Tally
from otel_limits.core.wording import suggestion
from otel_limits.quotas.conversation_sync import sums_of
from otel_limits.quotas.engine import Engine
from otel_limits.quotas.keys import EVERYTHING, Key
from otel_limits.quotas.quota import in_unit
from otel_limits.quotas.store import (
    LOOKED_AT,
    Count,
    CountState,
    KeepsConversations,
    PermanentStoreError,
    QuotaStore,
    ReadCounts,
    StoreError,
    resets_at,
)
from otel_limits.runs.registry import LIVE

if TYPE_CHECKING:
    from otel_limits.core.limits import Limits
    from otel_limits.core.usage import Number
    from otel_limits.quotas.client import StoreClient
    from otel_limits.quotas.quota import Quota
    from otel_limits.quotas.store import ConversationRecord


WILDCARD: Final = re.compile(r"[*?[]")
"""Part of a glob that no plain text is compared with."""

NOT_ENABLED: Final = (
    "otel-limits is not enabled in this process. Call otel_limits.enable(), or import your agent's "
    "framework first."
)


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
        ValueError: Nothing is enabled, no such quota is enforced, or a part of its key is missing.
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
    if not LIVE.observers.all:
        raise ValueError(NOT_ENABLED)
    held = {quota.name: quota for quota in gate.quotas()} if isinstance(gate, Engine) else {}
    if not isinstance(gate, Engine) or name not in held:
        known = ", ".join(held) or "none; set OTEL_LIMITS_POLICY to a file with quotas"
        hint = suggestion(name, held, f"Known quotas: {known}.")
        raise ValueError(f"No quota named {quote_value(name)} is enforced. {hint}")
    quota = held[name]
    given = {"agent": agent, "model": model}
    for source in quota.key.sources:
        if source in given and given[source] is None:
            raise ValueError(
                f"Quota {quote_value(name)} has one count per {source}: pass {source}=…."
            )

    def look_up(source: str) -> object:
        kind, _, rest = source.partition(".")
        if kind == "baggage":
            return current_baggage.get_baggage(rest) if baggage is None else baggage.get(rest)
        return given[source] if source in given else (attributes or {}).get(rest)

    key = quota.key.key(name, look_up)
    count, amount = quota.count(key, gate.client.now()), quota.amount_of(key, look_up)
    return _Question(gate.client, quota, key, ReadCounts(((count, amount),)))


# --- the usage of every key -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyUse:
    """Usage of one quota key."""

    quota: str
    key: str
    unit: str
    used: Number
    reserved: Number
    remaining: Number
    limit: Number
    """Including grants."""
    resets: float | None
    """Start of the next window, or when a token bucket is full, in seconds since the epoch.

    `None` without a window.
    """
    blocked: str | None = None
    """The reason of an operator's block, possibly empty; `None` if not blocked."""
    has_changed_limit: bool = False
    """Whether an operator changed the limit with `quotas set` or `quotas grant`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationUse:
    """A conversation and the limit whose cap it is closest to."""

    conversation: str
    """Its hash."""
    agent: str
    limit: str
    """Such as `conversation_max_turns`."""
    unit: str
    used: Number
    cap: Number
    """Including what persons have granted."""
    idle_since: float
    """The time of its last model call, in seconds since the epoch."""

    @property
    def share(self) -> float:
        """The part of the cap that is used."""
        return float(self.used) / float(self.cap)


class Uses(NamedTuple):
    """Usage of keys; within each quota, those closest to their limit first."""

    rows: list[KeyUse]
    omitted: int
    """Keys that `top` left out."""
    conversations: Sequence[ConversationUse] = ()
    """Conversations near a cap."""
    is_pattern_of_hashes: bool = False
    """True if a glob was compared with keys of which values are shown as hashes."""
    damaged: Sequence[str] = ()
    """A sentence for each part that could not be read because of another program's data."""


def read_use(
    store: QuotaStore, quotas: Iterable[Quota], *, glob: str = "*", top: int | None = None
) -> Uses:
    """Return the usage of keys in the current window; an unused quota has one row.

    Args:
        store: The quota store.
        quotas: Quotas to read.
        glob: A key in the form of its quota, a key as it is displayed, or a glob for the latter.
        top: Maximum keys per quota.

    Raises:
        StoreError: The store is unavailable.
    """
    now = store.now()
    rows, damaged = list[KeyUse](), list[str]()
    omitted, is_pattern_of_hashes = 0, False
    for quota in quotas:
        is_pattern_of_hashes |= bool(WILDCARD.search(glob)) and quota.key.has_hashes
        # Counted while they are read, because a quota may have more keys than fit in memory.
        numbers = itertools.count()
        uses = _uses(store, quota, now, glob, damaged)
        found = (use for use, _ in zip(uses, numbers, strict=False))
        try:
            nearest = (
                sorted(found, key=_order) if top is None else nsmallest(top, found, key=_order)
            )
        except PermanentStoreError as error:
            damaged.append(_unreadable(quota, error))
            continue
        rows += nearest
        omitted += next(numbers) - len(nearest)
    return Uses(rows, omitted, is_pattern_of_hashes=is_pattern_of_hashes, damaged=damaged)


def _unreadable(quota: Quota, error: PermanentStoreError) -> str:
    return f"quota {quota.name!r}: {error}."


def _order(use: KeyUse) -> tuple[float, str]:
    return float(use.remaining) / float(use.limit), use.key


def _uses(
    store: QuotaStore, quota: Quota, now: float, glob: str, damaged: list[str]
) -> Iterator[KeyUse]:
    counts = _counts(store, quota, now, glob)
    while page := list(islice(counts, LOOKED_AT)):
        for count, state in _states(store, quota, page, damaged):
            figures = quota.figures(state)
            yield KeyUse(
                quota=quota.name,
                key=count.shown,
                unit=figures.unit,
                used=figures.used,
                reserved=figures.reserved,
                remaining=figures.left,
                limit=figures.limit,
                resets=None if quota.unit == "concurrency" else resets_at(count, state, now),
                blocked=state.block.reason if state.block else None,
                has_changed_limit=state.limit not in _limits_of_policy(quota, count),
            )


def _states(
    store: QuotaStore, quota: Quota, page: Sequence[Count], damaged: list[str]
) -> list[tuple[Count, CountState]]:
    """Read the state of each count, except of those with another program's data."""
    try:
        states = store.look([(count, quota.keys.get(count.key, quota.amount)) for count in page])
    except PermanentStoreError as error:
        if not error.damaged:
            raise
        damaged.append(_unreadable(quota, error))
        rest = [count for n, count in enumerate(page) if n not in error.damaged]
        return _states(store, quota, rest, damaged)
    return list(zip(page, states, strict=True))


def _limits_of_policy(quota: Quota, count: Count) -> set[int]:
    """Return the limits that a key has without an operator's changes: one for each plan."""
    amounts = {quota.keys.get(count.key, quota.amount), *quota.plans.values()}
    return amounts if count.refill is None else {count.refill.capacity(each) for each in amounts}


def read_conversations(
    store: QuotaStore,
    caps_of: Callable[[str], Limits],
    least: float,
    *,
    glob: str = "*",
    top: int | None = None,
) -> list[ConversationUse]:
    """Return the conversations that are near a cap, the closest first.

    Args:
        store: The quota store.
        caps_of: Agent → the caps of its conversations.
        least: The part of a cap that is used.
        glob: Glob for hashes.
        top: Maximum number of conversations.

    Raises:
        StoreError: The store is unavailable.
    """
    if not isinstance(store, KeepsConversations):
        return []
    uses = (
        max(_limits_of(record, caps_of(record.agent)), key=lambda use: use.share, default=None)
        for record in store.conversations()
        if fnmatchcase(record.conversation, glob)
    )
    near = [use for use in uses if use is not None and use.share >= least]
    return sorted(near, key=lambda use: (-use.share, use.conversation))[:top]


def _limits_of(record: ConversationRecord, caps: Limits) -> Iterator[ConversationUse]:
    """Yield the usage of each limit of a conversation."""
    sums = sums_of(record.sums)
    tally = Tally(
        turns=sums.turns,
        model_calls=sums.model_calls,
        tool_calls=sums.tool_calls,
        input=sums.tokens,
        cost_at_most=sums.cost_at_most,
    )
    for limit, cap in caps.active:
        yield ConversationUse(
            conversation=record.conversation,
            agent=record.agent,
            limit=CONVERSATION_PREFIX + limit.name,
            unit=limit.unit,
            used=limit.observed(tally),
            cap=cap + sums.granted.get(limit.name, 0),  # type: ignore[operator]  # of the same type
            idle_since=record.changed_at,
        )


def find_key(store: QuotaStore, quota: Quota, text: str) -> Key:
    """Find the key that a person wrote, in the form of the template or as it is shown.

    A text that can be several keys is the one that is in use.

    Raises:
        StoreError: The store is unavailable.
        ValueError: The quota has no such keys, or the text can be several.
    """
    possible = {key.id: key for key in _possible(quota, text)}
    used = {
        key.id: key for key in store.keys(quota.name) if key.shown == text or key.id in possible
    }
    if len(used) == 1:
        return next(iter(used.values()))
    if len({key.shown for key in used.values()}) > 1:
        listed = quota.key.several(quota.name, text, used.values())
        raise ValueError(f"{listed} All are in use: write one of them.")
    if len(possible) > 1 and not used:
        listed = quota.key.several(quota.name, text, possible.values())
        raise ValueError(f"{listed} None is in use. {quota.key.separation}")
    return quota.key.key_of_text(quota.name, text)


def _counts(store: QuotaStore, quota: Quota, now: float, glob: str) -> Iterator[Count]:
    if not quota.key.sources:
        yield quota.count(quota.key.key_of_text(quota.name, EVERYTHING), now)
        return
    # Values are shown as hashes, so a plain key is compared in the form in which it is shown.
    globs = {glob, *(key.shown for key in _possible(quota, glob))}
    is_used = False
    for key in store.keys(quota.name):
        is_used = True
        # A key may contain the characters of a glob, such as `w[1]`.
        if key.shown in globs or any(fnmatchcase(key.shown, each) for each in globs):
            yield quota.count(key, now)
    if not is_used:
        yield quota.count(Key("", f"no {quota.key.text} yet"), now)


def _possible(quota: Quota, text: str) -> list[Key]:
    """Return the keys that a text can be; none if it has another form."""
    try:
        return quota.key.keys_of_text(quota.name, text)
    except ValueError:
        return []
