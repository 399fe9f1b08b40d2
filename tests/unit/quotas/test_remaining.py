"""The usage of keys, chosen by the text that an operator gives."""

from __future__ import annotations

import pytest

from otel_limits.quotas.keys import Template, digest
from otel_limits.quotas.memory import MemoryStore
from otel_limits.quotas.quota import Quota
from otel_limits.quotas.remaining import read_use
from otel_limits.quotas.store import Charge, Count, Settle
from otel_limits.quotas.windows import Windows

ACME = f"#{digest('acme')[:12]}"


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
    ],
)
def test_key_is_found_as_written_as_shown_and_by_a_pattern(
    template: str, text: str, shown: str | None, *, is_of_hashes: bool
) -> None:
    """Only a pattern for a value whose hash is shown finds nothing, and that is stated."""
    store, windows = MemoryStore(), Windows("month")
    quota = Quota(name="q", unit="model_calls", amount=9, windows=windows, key=Template(template))
    key = quota.key.key("q", {"agent": "writer", "baggage.tenant": "acme"}.get)
    count = Count("q", key.id, windows.at(store.now()), "model_calls", key.shown)
    store.run([Settle("one", (Charge(count=count, amount=9),))])
    uses = read_use(store, [quota], glob=text)
    assert [use.key for use in uses.rows] == ([] if shown is None else [shown])
    assert uses.is_pattern_of_hashes == is_of_hashes
