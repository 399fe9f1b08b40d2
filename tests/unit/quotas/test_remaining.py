"""The usage of keys, chosen by the text that an operator gives."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from otel_limits.quotas.keys import Key, Template, digest
from otel_limits.quotas.memory import MemoryStore
from otel_limits.quotas.quota import Quota
from otel_limits.quotas.remaining import find_key, read_use
from otel_limits.quotas.store import Charge, Count, CountState, Settle
from otel_limits.quotas.windows import Windows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ACME = f"#{digest('acme')[:12]}"


def use(store: MemoryStore, quota: Quota, values: Mapping[str, str]) -> Key:
    """Record a call."""
    key = quota.key.key(quota.name, values.get)
    charge = Charge(count=quota.count(key, store.now()), amount=9)
    store.run([Settle(key.id, (charge,))])
    return key


@pytest.mark.parametrize(
    ("template", "text", "shown", "is_of_hashes"),
    [
        ("baggage.tenant", "acme", ACME, False),
        ("baggage.tenant", ACME, ACME, False),
        ("baggage.tenant", f"{ACME[:5]}*", ACME, True),
        ("baggage.tenant", "ac*", None, True),
        ("baggage.tenant", "other", None, False),
        ("{agent}/{baggage.tenant}", "writer/acme", f"writer/{ACME}", False),
        ("{agent}/{baggage.tenant}", "w*/acme", f"writer/{ACME}", True),
        ("{agent}/{baggage.tenant}", "writer/*", f"writer/{ACME}", True),
        ("{agent}/{baggage.tenant}", "acme", None, False),
        ("agent", "writer", "writer", False),
        ("agent", "wri*", "writer", False),
        ("model", "m/w[1]", "m/w[1]", False),
        ("{model}/{baggage.tenant}", "m/w[1]/acme", f"m/w[1]/{ACME}", True),
    ],
)
def test_key_is_found_as_written_as_shown_and_by_a_pattern(
    template: str, text: str, shown: str | None, *, is_of_hashes: bool
) -> None:
    """Only a pattern for a value whose hash is shown finds nothing, and that is stated."""
    store, windows = MemoryStore(), Windows("month")
    quota = Quota(name="q", unit="model_calls", amount=9, windows=windows, key=Template(template))
    values = {"agent": "writer", "model": "m/w[1]", "baggage.tenant": "acme"}
    use(store, quota, values)
    uses = read_use(store, [quota], glob=text)
    assert [row.key for row in uses.rows] == ([] if shown is None else [shown])
    assert uses.is_pattern_of_hashes == is_of_hashes


def test_typed_key_is_the_one_in_use_that_it_can_be() -> None:
    """Otherwise the change is confirmed, but applies to a key that no call uses."""
    store, windows = MemoryStore(), Windows("month")
    template = Template("{agent}/{baggage.user}")
    quota = Quota(name="q", unit="model_calls", amount=9, windows=windows, key=template)
    text = "team/writer/joe"
    with pytest.raises(ValueError, match=r"several keys .*: team/#.*, team/writer/#.*None is in"):
        find_key(store, quota, text)
    used = use(store, quota, {"agent": "team/writer", "baggage.user": "joe"})
    assert find_key(store, quota, text) == find_key(store, quota, used.shown) == used
    # A key that can only be one is found before it is in use.
    unused = template.key("q", {"agent": "team", "baggage.user": "ann"}.get)
    assert find_key(store, quota, "team/ann") == unused
    with pytest.raises(ValueError, match="is a hash, so write the value itself"):
        find_key(store, quota, unused.shown)
    other = use(store, quota, {"agent": "team", "baggage.user": "writer/joe"})
    with pytest.raises(ValueError, match=r"All are in use: write one of them\."):
        find_key(store, quota, text)
    assert find_key(store, quota, other.shown) == other


def test_typed_key_that_looks_like_another_one_is_refused() -> None:
    """The template has to separate them."""
    store, windows = MemoryStore(), Windows("month")
    template = Template("{agent}/{model}")
    quota = Quota(name="q", unit="model_calls", amount=9, windows=windows, key=template)
    one = use(store, quota, {"agent": "a", "model": "b/c"})
    assert find_key(store, quota, "a/b/c") == one
    use(store, quota, {"agent": "a/b", "model": "c"})
    with pytest.raises(ValueError, match=r"e\.g\. key: '\{agent\}\|\{model\}'"):
        find_key(store, quota, "a/b/c")


class FixedStore(MemoryStore):
    """A store in which each key has a limit: of the policy, of a plan, or set by an operator."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def look(self, counts: Sequence[tuple[Count, int]]) -> list[CountState]:
        """Return the states."""
        return [replace(state, limit=self.limit) for state in super().look(counts)]


USERS = Quota(
    name="q", unit="tokens", amount=90, windows=Windows("month"), key=Template("baggage.tenant")
)
ACME_ID = USERS.key.key("q", {"baggage.tenant": "acme"}.get).id
PLANNED = replace(USERS, plan="baggage.plan", plans={"pro": 500})


@pytest.mark.parametrize(
    ("quota", "limit", "is_changed"),
    [
        (USERS, 90, False),
        (USERS, 95, True),
        (replace(USERS, keys={ACME_ID: 500}), 500, False),
        (replace(USERS, keys={ACME_ID: 500}), 90, True),
        (PLANNED, 90, False),
        (PLANNED, 500, False),
        (PLANNED, 95, True),
        # A token bucket holds a part of the amount.
        (replace(USERS, pace="smooth", burst=7), 7, False),
        (replace(USERS, pace="smooth"), 9, False),
        (replace(USERS, pace="smooth"), 10, True),
    ],
)
def test_limit_that_an_operator_changed_is_marked(
    quota: Quota, limit: int, *, is_changed: bool
) -> None:
    """Otherwise a person searches the policy file for a number that is not there."""
    store = FixedStore(limit)
    use(store, quota, {"baggage.tenant": "acme"})
    (row,) = read_use(store, [quota]).rows
    assert row.has_changed_limit == is_changed
