"""The records of vendors: every fact has a source, and the tables have one answer for each name."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields
from datetime import date

import pytest

from otel_limits.bindings.strands.request_terms import terms_of
from otel_limits.core.listings import vendor_at
from otel_limits.vendors.records import CLASSES, VENDORS
from otel_limits.vendors.vendor import Vendor
from tests.test_terms import asked

FLAGS = ("name", "is_gateway", "is_listed", "sources")
"""Fields that are no facts about a vendor's bills."""


def known_of(vendor: Vendor) -> set[str]:
    """Return the fields of a record that state something."""
    defaults = Vendor(name=vendor.name)
    names = (each.name for each in fields(Vendor) if each.name not in FLAGS)
    return {name for name in names if getattr(vendor, name) != getattr(defaults, name)}


@pytest.mark.parametrize("vendor", VENDORS, ids=lambda each: each.name)
def test_each_fact_has_a_dated_source(vendor: Vendor) -> None:
    """Vendors change their prices and formats: a reader must be able to look them up again."""
    assert known_of(vendor) <= vendor.sources.keys()
    for source in vendor.sources.values():
        assert source.address
        assert date.fromisoformat(source.looked_up) <= date(2027, 12, 31)


def test_each_name_host_and_class_belongs_to_one_vendor() -> None:
    """Otherwise the price would depend on the order of the records."""
    names = Counter(name for each in VENDORS for name in (each.name, *each.aliases))
    hosts = Counter(host for each in VENDORS for host in each.hosts)
    modules = Counter(module for each in VENDORS for module in each.classes)
    assert {
        name for found in (names, hosts, modules) for name, n in found.items() if n > 1
    } == set()
    assert len(CLASSES) == sum(modules.values())


def test_deepseek_is_known_by_its_host() -> None:
    """The newest record, written as the page for contributors says: one file, one name."""
    assert vendor_at("https://api.deepseek.com/v1") == "deepseek"
    model = asked("openai", client_args={"base_url": "https://api.deepseek.com"})
    assert terms_of(model).vendor == "deepseek"


@pytest.mark.parametrize("vendor", VENDORS, ids=lambda each: each.name)
def test_hosts_are_lower_case_names(vendor: Vendor) -> None:
    """They are compared with the parsed host of an address, so a scheme or path never matches."""
    assert all(re.fullmatch(r"[a-z0-9.-]+", host) for host in vendor.hosts)
