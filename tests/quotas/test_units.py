"""The unit is part of what is counted, and what earlier versions counted without one is read on."""

from __future__ import annotations

import time
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

import otel_limits
from otel_limits.quotas.keys import Template
from otel_limits.quotas.quota import Quota
from otel_limits.quotas.recovery import as_text, from_text
from otel_limits.quotas.store import (
    FOREVER,
    Block,
    Charge,
    Count,
    Demand,
    Reply,
    Reserve,
    Settle,
    SharedStore,
    Standing,
)
from otel_limits.quotas.windows import Windows
from otel_limits.testing import ScriptedModel, endless, says

if TYPE_CHECKING:
    from otel_limits.quotas.quota import Unit
    from tests.conftest import MakeAgent
    from tests.quotas.conftest import Hold, Server

PRICES: Final = {"*": {"price": {"input": 1_000_000, "output": 1_000_000}}}
"""A dollar for a token."""
TAG: Final = "{otel_limits}"


@pytest.fixture(params=["memory", "redis", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    """Every kind of place where the same scripts or the same rules count."""
    if request.param == "memory":
        return "memory://"
    found = request.getfixturevalue({"redis": "server", "cluster": "cluster"}[request.param])
    return found if isinstance(found, str) else str(found.url)


def test_an_edited_unit_begins_a_count_of_its_own(
    hold: Hold, make_agent: MakeAgent, url: str
) -> None:
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


# --- the layout without units ---------------------------------------------------------------------


class Former:
    """A worker of the version that wrote no unit, with its scripts as they were."""

    def __init__(self, server: Server) -> None:
        self._client = server.client

    def reserve(self, name: str, amount: int, limit: int = 100, known: int = 0) -> str:
        """Reserve of the count; the first word of the reply."""
        window = THIS.window
        keys = [f"{TAG}:operation:{name}", f"{TAG}:expired", BUCKET, f"{BUCKET}:leases"]
        keys += [f"{TAG}:q:{THIS.key}:grants", f"{TAG}:q:index"]
        arguments = [name, 300_000, 3_600_000, amount, limit, window.start * 1000]
        arguments += [window.end * 1000, (window.end + 90_000) * 1000, 1, 1, 0, known]
        return self._run("reserve", keys, [*arguments, f"{THIS.key} {THIS.shown}"]).split()[0]

    def settle(self, name: str, amount: int) -> None:
        """Settle it."""
        keys = [f"{TAG}:operation:{name}", BUCKET, f"{BUCKET}:leases"]
        expiry = (THIS.window.end + 90_000) * 1000
        self._run("settle", keys, [name, 3_600_000, amount, expiry, 0])

    def grant(self, amount: int) -> None:
        """Permit more for an hour."""
        keys = [f"{TAG}:q:{THIS.key}:grants", f"{TAG}:q:index"]
        until = int(time.time() + 3600) * 1000
        self._run("grant", keys, [f"{amount}:abc", until, 1000, f"{THIS.key} {THIS.shown}"])

    def _run(self, script: str, keys: list[str], arguments: list[Any]) -> str:
        folder = Path(__file__).parent / "former"
        text = "\n".join((folder / f"{each}.lua").read_text() for each in ("common", script))
        return str(self._client.eval(text, len(keys), *keys, *arguments))


def this(unit: Unit) -> Count:
    """What a quota of this unit counts now."""
    quota = Quota(name="q", unit=unit, amount=100, windows=Windows("P366D"))
    return quota.count(Template("").key("q", dict[str, object]().get), time.time())


THIS: Final = this("usd")
BUCKET: Final = f"{TAG}:q:{THIS.key}:{THIS.window.start}"


@pytest.fixture
def former(server: Server) -> Former:
    """A worker that has not been upgraded yet."""
    return Former(server)


def reserve(store: SharedStore, name: str, amount: int, unit: Unit = "usd") -> Reply:
    """Reserve as this version does."""
    demand = Demand(count=this(unit), amount=amount, limit=100)
    (reply,) = store.run([Reserve(name, (demand,), 300.0)])
    return reply


def settle(store: SharedStore, name: str, amount: int, unit: Unit = "usd") -> None:
    """Settle as this version does."""
    store.run([Settle(name, (Charge(count=this(unit), amount=amount),))])


def test_what_an_earlier_version_counted_is_read_on(former: Former, store: SharedStore) -> None:
    """What was used and what is reserved; a budget does not begin anew with an upgrade."""
    former.reserve("a", 60)
    former.settle("a", 55)
    former.reserve("b", 20)
    assert store.look([(THIS, 100)]) == [Standing(55, 20, 100)]
    assert reserve(store, "c", 26).status == "refused"
    assert reserve(store, "d", 25).standings == (Standing(55, 45, 100),)
    settle(store, "b", 10)  # by the ledger, for a worker of the earlier version that died
    assert store.look([(THIS, 100)]) == [Standing(65, 25, 100)]


def test_what_an_earlier_version_settled_is_not_counted_again(
    former: Former, store: SharedStore
) -> None:
    """A call that lasted longer than its lease is sent once more out of a ledger."""
    former.reserve("a", 60)
    former.settle("a", 55)
    settle(store, "a", 55)
    assert store.look([(THIS, 100)]) == [Standing(55, 0, 100)]


def test_two_versions_hold_one_budget(former: Former, store: SharedStore) -> None:
    """While a fleet is upgraded worker by worker, each sees what the others use."""
    reserve(store, "a", 60)
    assert former.reserve("b", 41) == "refused"
    assert former.reserve("c", 40) == "admitted"
    settle(store, "a", 50)
    former.settle("c", 30)
    assert store.look([(THIS, 100)]) == [Standing(80, 0, 100)]
    assert former.reserve("d", 21) == "refused"
    assert reserve(store, "e", 21).status == "refused"


def test_what_was_counted_without_a_unit_is_of_the_first_that_asks(
    former: Former, store: SharedStore
) -> None:
    """Nobody wrote down what it was; from then on it is known."""
    former.reserve("a", 60)
    former.settle("a", 60)
    assert reserve(store, "b", 41).status == "refused"
    assert reserve(store, "c", 40).status == "admitted"
    assert store.look([(this("tokens"), 100)]) == [Standing(0, 0, 100)]
    assert reserve(store, "d", 100, "tokens").status == "admitted"
    assert store.look([(THIS, 100), (this("tokens"), 100)]) == [
        Standing(60, 40, 100),
        Standing(0, 100, 100),
    ]


def test_a_grant_without_a_unit_is_of_the_first_that_asks(
    former: Former, store: SharedStore
) -> None:
    """A grant of 5 USD permits no 5,000,000,000 tokens."""
    former.grant(50)
    assert reserve(store, "a", 150).status == "admitted"
    assert reserve(store, "b", 101, "tokens").status == "refused"
    assert former.reserve("c", 1) == "refused"  # it reads the grant on, and what is reserved
    assert former.reserve("d", 0) == "admitted"


def test_a_grant_is_of_its_unit_and_a_block_of_every_unit(store: SharedStore) -> None:
    """A key that is blocked stays so when the unit is edited."""
    store.grant(THIS, 50, time.time() + 3600)
    assert store.look([(THIS, 100), (this("tokens"), 100)]) == [
        Standing(0, 0, 150),
        Standing(0, 0, 100),
    ]
    store.block(THIS, Block(FOREVER, "unpaid"))
    assert reserve(store, "a", 1, "tokens").status == "refused"


def test_a_reset_counts_its_own_unit_from_0(store: SharedStore) -> None:
    """The other one stands as it did."""
    for name, unit in (("a", "usd"), ("b", "tokens")):
        settle(store, name, 60, unit)  # type: ignore[arg-type]
    store.reset(this("tokens"))
    looked = store.look([(THIS, 100), (this("tokens"), 100)])
    assert [each.used for each in looked] == [60, 0]


def test_a_settlement_of_an_earlier_ledger_has_no_unit() -> None:
    """It is charged to what stands there; one of this version says its unit."""
    charges = (Charge(count=THIS, amount=7),)
    (charge,) = from_text("a", as_text(charges)).charges
    assert (charge.count.unit, charge.amount) == ("usd", 7)
    window = f"{THIS.window.start}, {THIS.window.end}"
    (charge,) = from_text("a", f'[["q", "k", {window}, 7]]').charges
    assert (charge.count.unit, charge.amount) == ("", 7)
