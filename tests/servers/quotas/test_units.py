"""Each unit of a quota is counted separately."""

from __future__ import annotations

import time
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Final

import pytest

import otel_limits
from otel_limits.quotas.keys import Template
from otel_limits.quotas.quota import Quota
from otel_limits.quotas.recovery import decode_charges, encode_charges
from otel_limits.quotas.store import (
    FOREVER,
    Block,
    Charge,
    Count,
    CountState,
    Demand,
    Grant,
    Reply,
    Reserve,
    Reset,
    Settle,
    SharedStore,
)
from otel_limits.quotas.windows import Windows
from otel_limits.testing import ScriptedModel, endless, says

if TYPE_CHECKING:
    from otel_limits.quotas.quota import Unit
    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold

PRICES: Final = {"*": {"price": {"input": 1_000_000, "output": 1_000_000}}}
"""One dollar per token."""


@pytest.fixture(params=["memory", "redis", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    """Every kind of store with its own scripts or rules."""
    if request.param == "memory":
        return "memory://"
    found = request.getfixturevalue({"redis": "server", "cluster": "cluster"}[request.param])
    return found if isinstance(found, str) else str(found.url)


def test_edited_unit_starts_a_separate_count(hold: Hold, make_agent: MakeAgent, url: str) -> None:
    """15 USD are not 15,000,000,000 tokens; edited back, the 15 USD are there again."""
    agent = make_agent(ScriptedModel(endless(says("done"))), tools=[])
    usd, tokens = ({unit: 1_000_000, "window": "P366D"} for unit in ("usd", "tokens"))
    hold({"year": usd}, url, models=PRICES)
    agent("go")
    assert otel_limits.remaining("year").used == 15
    hold({"year": tokens}, url, models=PRICES)
    assert otel_limits.remaining("year") == replace(
        otel_limits.remaining("year"), unit="tokens", used=0, reserved=0, left=1_000_000
    )
    agent("go")
    assert otel_limits.remaining("year").used == 15
    hold({"year": usd}, url, models=PRICES)
    assert otel_limits.remaining("year").used == Decimal(15)


def this(unit: Unit) -> Count:
    """The current count of a quota with this unit."""
    quota = Quota(name="q", unit=unit, amount=100, windows=Windows("P366D"))
    return quota.count(Template("").key("q", dict[str, object]().get), time.time())


THIS: Final = this("usd")


def reserve(store: SharedStore, name: str, amount: int, unit: Unit = "usd") -> Reply:
    """Reserve as this version does."""
    demand = Demand(count=this(unit), amount=amount, limit=100)
    (reply,) = store.run([Reserve(name, (demand,), 300.0)])
    return reply


def settle(store: SharedStore, name: str, amount: int, unit: Unit = "usd") -> None:
    """Settle as this version does."""
    store.run([Settle(name, (Charge(count=this(unit), amount=amount),))])


def test_a_grant_is_of_its_unit_and_a_block_of_every_unit(store: SharedStore) -> None:
    """A blocked key stays blocked when the unit is edited."""
    store.change(THIS, Grant(50, time.time() + 3600))
    assert store.look([(THIS, 100), (this("tokens"), 100)]) == [
        CountState(0, 0, 150),
        CountState(0, 0, 100),
    ]
    store.change(THIS, Block(FOREVER, "unpaid"))
    assert reserve(store, "a", 1, "tokens").status == "refused"


def test_a_reset_counts_its_own_unit_from_0(store: SharedStore) -> None:
    """The other one is unchanged."""
    for name, unit in (("a", "usd"), ("b", "tokens")):
        settle(store, name, 60, unit)  # type: ignore[arg-type]
    store.change(this("tokens"), Reset())
    looked = store.look([(THIS, 100), (this("tokens"), 100)])
    assert [each.used for each in looked] == [60, 0]


def test_settlement_in_the_ledger_keeps_its_unit() -> None:
    """A surviving worker charges the same count as the killed one."""
    (charge,) = decode_charges(encode_charges((Charge(count=THIS, amount=7),)))
    assert (charge.count.unit, charge.amount) == ("usd", 7)
