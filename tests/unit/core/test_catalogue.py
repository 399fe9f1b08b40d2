"""The price list: it agrees with a second one, and its date is shown where prices matter."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from datetime import date, timedelta
from pathlib import Path

import pytest

from otel_limits.cli import main
from otel_limits.cli.doctor.doctor_command import findings_of
from otel_limits.cli.doctor.finding import Context
from otel_limits.core import catalogue
from otel_limits.core.catalogue import (
    LIST,
    OLD_DAYS,
    PRICE_CHANGE,
    RELEASED,
    current_list,
    list_in_use,
    old_list,
)
from otel_limits.core.price_lookup import DISPUTED_PRICE, Prices
from otel_limits.core.terms import BillableCall, region_of
from otel_limits.vendors.facts import compared_prices
from tests.paths import ROOT
from tests.readme import with_tables

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="genai-prices cannot be installed on Python 3.10"
)


def test_each_disagreement_has_a_reason() -> None:
    """A price of ours that only one list knows may be wrong by any factor."""
    from tests.price_lists.compare import compared, disagreements, reason_of

    assert len(list(compared())) > 800
    unexplained = [
        (each.model, ratio)
        for each in disagreements()
        for ratio in each.ratios.values()
        if reason_of(each.vendor, each.model, ratio, is_deprecated=each.is_deprecated) is None
    ]
    assert unexplained == []


def test_page_lists_the_disagreements() -> None:
    """Run `python -m tests.generate tables` when this fails."""
    from tests.price_lists.compare import explained_table

    page = (ROOT / "otel_limits/docs/prices.md").read_text(encoding="utf-8")
    assert with_tables(page, {"price-lists": explained_table}) == page


def test_tables_follow_from_the_comparison() -> None:
    """Run `python -m tests.price_lists.compare` when this fails."""
    from tests.price_lists.compare import LISTS, as_yaml, tables

    assert LISTS.read_text(encoding="utf-8") == as_yaml(tables())


def test_bounds_of_disputed_prices_are_not_below_the_second_list() -> None:
    """Whichever list is right, a limit in USD halts in time."""
    from tests.price_lists.compare import USAGES, amount_of, rates_at, second_list

    prices, below, seen = Prices(), [], set()
    for model, (vendor, sizes, _) in second_list()["models"].items():
        for usage in USAGES:
            call = BillableCall(model=model, provider=vendor, usage=usage, region=region_of(model))
            found, theirs = prices.quote(call), amount_of(usage, rates_at(usage, sizes))
            is_bounded = "us-gov" not in model  # nothing bounds the prices of its regions
            if found.unknown == DISPUTED_PRICE and theirs is not None and is_bounded:
                listed = prices.find(model, vendor)
                assert listed is not None
                seen.add((listed.vendor, listed.info.id))
                below += [(model, usage, found.at_most)] if (found.at_most or 0) < theirs else []
    known = compared_prices().disputed
    assert seen == {(vendor, model) for vendor, models in known.items() for model in models}
    assert below == []


# --- the date of the list -------------------------------------------------------------------------


def installed() -> str:
    """Return the version of the list."""
    return importlib.metadata.version("genai-prices")


def date_of_installed() -> date:
    """Return the date of the list."""
    found = catalogue.list_date(installed())
    assert found is not None
    return found


def travel(monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    """Make the list this many days old."""
    now = date_of_installed() + timedelta(days=days)
    monkeypatch.setattr(catalogue, "today", lambda: now)
    monkeypatch.setitem(RELEASED, installed(), now - timedelta(days=days))


def test_list_is_not_dated_in_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    """A price that begins next month does not make a list new."""
    assert date_of_installed() <= catalogue.today()
    monkeypatch.delitem(RELEASED, installed(), raising=False)
    monkeypatch.setattr(catalogue, "today", lambda: date(2100, 1, 1))
    newest = date_of_installed()
    monkeypatch.setattr(catalogue, "today", lambda: newest - timedelta(days=1))
    assert date_of_installed() < newest


def test_release_dates_a_list_that_has_no_newer_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list is checked at its release, even if no price has changed for weeks."""
    newer = date_of_installed() + timedelta(days=20)
    monkeypatch.setitem(RELEASED, installed(), newer)
    assert date_of_installed() == newer


def test_dates_on_a_list_are_those_of_its_prices() -> None:
    """They are read from the text of the list: all that the imported list has."""
    models = [model for provider in current_list().providers for model in provider.models]
    conditions = [
        each.constraint
        for model in models
        for each in (
            *(model.prices if isinstance(model.prices, list) else ()),
            *(model.price_variants or ()),
        )
    ]
    listed = {each.start_date for each in conditions if hasattr(each, "start_date")}
    spec = importlib.util.find_spec(LIST)
    assert spec is not None
    assert spec.origin is not None
    read = PRICE_CHANGE.findall(Path(spec.origin).read_text(encoding="utf-8"))
    assert {date(*map(int, found)) for found in read} == listed


@pytest.mark.parametrize(("days", "is_old"), [(0, False), (OLD_DAYS - 1, False), (OLD_DAYS, True)])
def test_list_is_old_after_sixty_days(
    monkeypatch: pytest.MonkeyPatch, days: int, *, is_old: bool
) -> None:
    """The warning names the package, its age and the command that updates it."""
    travel(monkeypatch, days)
    warning = old_list()
    assert (warning is not None) == is_old
    if warning is not None:
        assert f"{installed()} of {date_of_installed()} is 60 days old" in warning
        assert warning.endswith("Run: pip install --upgrade genai-prices")


def test_check_shows_the_date_and_warns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings have it as a row; the warning changes no exit status."""
    travel(monkeypatch, 61)
    assert main(["check"]) == 0
    said = capsys.readouterr()
    assert str(list_in_use()) in said.out
    assert f"genai-prices {installed()} of {date_of_installed()}" == list_in_use()
    assert "is 61 days old" in said.err
    travel(monkeypatch, 3)
    main(["check"])
    assert "days old" not in capsys.readouterr().err


def test_doctor_shows_the_date_and_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a separate finding, with or without a model."""
    travel(monkeypatch, 3)
    (found,) = [each for each in findings_of("doctor", Context({})) if each.name == "price list"]
    assert (found.status, found.text) == ("ok", f"{list_in_use()}.")
    travel(monkeypatch, 61)
    (found,) = [each for each in findings_of("doctor", Context({})) if each.name == "price list"]
    assert found.status == "warn"
    assert f"of {date_of_installed()} is 61 days old" in found.text
