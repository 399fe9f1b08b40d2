"""The files of vendors: every fact has a source, and there is one answer for each name."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import astuple
from datetime import date
from decimal import Decimal
from itertools import chain
from typing import Any, Final, get_args

import pytest

from otel_limits.bindings.request_settings import setting_names
from otel_limits.bindings.strands.requests import terms_of
from otel_limits.core.price_lookup import Prices
from otel_limits.core.terms import billable_call, highest_premium, premium, region_of, vendor_at
from otel_limits.core.usage import Usage
from otel_limits.testing import ScriptedModel
from otel_limits.vendors.facts import facts
from otel_limits.vendors.records import (
    VENDORS,
    Cached,
    Rest,
    other_media,
    vendors,
    vendors_of_classes,
)
from tests.paths import ROOT
from tests.price_list import listed
from tests.unit.core.test_terms import asked

FOLDER: Final = ROOT / "otel_limits/vendors"
NOT_VENDORS: Final = {"shared", "price_lists"}
FILES: Final[dict[str, dict[str, Any]]] = {name: facts(f"vendors/{name}.yaml") for name in VENDORS}
SHARED: Final[dict[str, Any]] = facts("vendors/shared.yaml")

REFUSALS: Final = "bindings/budget_refusals.yaml"

FLAGS = {"is_gateway", "is_listed", "sources"}
"""Entries of a file that are no facts about a vendor's bills."""


def test_each_file_is_in_the_table() -> None:
    """Files are not searched for, so one that is missing there would have no effect."""
    names = {path.stem for path in FOLDER.glob("*.yaml")}
    assert names == {*VENDORS, *NOT_VENDORS}
    assert len(set(VENDORS)) == len(VENDORS)


@pytest.mark.parametrize("name", VENDORS)
def test_each_fact_has_a_dated_source(name: str) -> None:
    """Vendors change their prices and formats: a reader must be able to look them up again."""
    sources = FILES[name].get("sources", {})
    assert FILES[name].keys() - FLAGS == sources.keys()
    for source in sources.values():
        known = SHARED["sources"][source] if isinstance(source, str) else source
        assert known.keys() == {"address", "date"}
        assert known["address"]
        assert type(known["date"]) is date
        assert known["date"] <= date(2027, 12, 31)


@pytest.mark.parametrize("name", VENDORS)
def test_each_file_has_the_types_of_a_vendor(name: str) -> None:
    """Files are not checked when they are read, which happens during a model call."""
    vendor, known = vendors()[name], FILES[name]
    for flag in ("is_gateway", "is_listed", "audio_as_text"):
        assert type(known.get(flag, False)) is bool
    for fact in ("aliases", "hosts", "apart", "token_tools"):
        held = known.get(fact, [])
        assert all(type(each) is str for each in held)
        assert len(set(held)) == len(held)
    for rule in (*vendor.classes.values(), *vendor.families.values()):
        assert rule.cached in get_args(Cached)
        assert rule.rest in get_args(Rest)
        assert {type(each) for each in astuple(rule)} == {str, bool}
    for media in (*vendor.media, other_media()):
        assert media.image.tokens(100, 100) > 0
        assert (type(media.page), type(media.is_default)) == (int, bool)
        assert media.audio > 0
    for premium_of in (
        () if vendor.region is None else (*vendor.region.premium, *vendor.region.dearest)
    ):
        assert 1 <= premium_of.factor < 2
    for pattern in (
        () if vendor.region is None else (*vendor.region.hosts, *vendor.region.model_ids)
    ):
        assert pattern.groups == 1


def test_each_name_host_and_class_belongs_to_one_vendor() -> None:
    """Otherwise the price would depend on the order of the records."""
    every = FILES.items()
    names = Counter(each for name, known in every for each in (name, *known.get("aliases", ())))
    hosts = Counter(host for _, known in every for host in known.get("hosts", ()))
    modules = Counter(module for _, known in every for module in known.get("classes", ()))
    assert {
        name for found in (names, hosts, modules) for name, n in found.items() if n > 1
    } == set()
    assert len(vendors_of_classes()) == sum(modules.values())


@listed
@pytest.mark.parametrize(
    ("module", "model", "address"),
    [
        ("openai", "MiniMax-M2", "https://api.minimax.io/v1"),
        ("anthropic", "MiniMax-M2", "https://api.minimax.io/anthropic"),
        ("litellm", "minimax/MiniMax-M2", None),
    ],
)
def test_minimax_has_its_price_through_each_class(
    module: str, model: str, address: str | None
) -> None:
    """The newest record, written as the page for contributors says."""
    terms = terms_of(asked(module, {"base_url": address}, model_id=model))
    call = billable_call(model, module, Usage(input=1_000_000), None, terms)
    assert Prices().quote(call).price == Decimal("0.3")


def test_minimax_in_china_has_no_price() -> None:
    """It bills in CNY, and the price list is in USD."""
    model = asked("openai", {"base_url": "https://api.minimaxi.com/v1"}, model_id="MiniMax-M2")
    call = billable_call("MiniMax-M2", "openai", Usage(input=1), None, terms_of(model))
    assert Prices().quote(call).price is None


def test_names_of_settings_and_refusals_are_texts() -> None:
    """YAML reads some names, such as `on` and `1e3`, as other types, which would match nothing."""
    settings, refusals = facts("bindings/request_settings.yaml"), facts(REFUSALS)
    names = [*chain(*settings.values()), *refusals["codes"], *chain(*refusals["phrases"].values())]
    assert {type(name) for name in names} == {str}
    assert len(setting_names().read) > 30
    assert all(400 <= status < 500 for status in refusals["phrases"])


@pytest.mark.parametrize("name", VENDORS)
def test_hosts_are_lower_case_names(name: str) -> None:
    """They are compared with the parsed host of an address, so a scheme or path never matches."""
    hosts = [host.replace("{amazon}", "*") for host in FILES[name].get("hosts", ())]
    assert all(re.fullmatch(r"[a-z0-9.*-]+", host) for host in (*hosts, *SHARED["amazon"]))


ADDRESSES: Final = [
    ("https://bedrock-runtime.us-east-1.amazonaws.com", "aws"),
    ("https://bedrock-runtime.us-east-1.amazonaws.com/openai/v1", "aws"),
    ("https://bedrock-runtime-fips.us-gov-west-1.amazonaws.com", "aws"),
    ("https://bedrock-runtime.eu-west-1.api.aws", "aws"),
    ("https://bedrock-mantle.us-west-2.api.aws/v1", "aws"),
    ("https://bedrock-runtime.eusc-de-east-1.amazonaws.eu", "aws"),
    ("https://bedrock-runtime.cn-north-1.amazonaws.com.cn", "aws"),
    ("https://vpce-0a1b-2c3d.bedrock-runtime.us-east-1.vpce.amazonaws.com", "aws"),
    ("https://runtime.sagemaker.us-east-1.amazonaws.com/endpoints/m/openai/v1", "sagemaker"),
    ("https://generativelanguage.googleapis.com/v1beta/openai/", "google"),
    ("https://aiplatform.googleapis.com/v1/", "google"),
    ("https://us-east5-aiplatform.googleapis.com/v1/", "google"),
    ("https://aiplatform.eu.rep.googleapis.com/v1/", "google"),
    ("https://us-east5-aiplatform-mine.p.googleapis.com/v1/", "google"),
    ("https://me.openai.azure.com/openai/v1/", "azure"),
    ("https://me.services.ai.azure.com/models", "azure"),
    ("https://me.cognitiveservices.azure.com", "azure"),
    ("https://me.swedencentral.models.ai.azure.com", "azure"),
    ("https://us-east-1.api.x.ai/v1", "x-ai"),
    ("https://api.deepseek.com/v1", "deepseek"),
    ("https://api.minimax.io/v1", "minimax"),
]
OWN_SERVERS = [
    "https://my-lb-123.us-east-1.elb.amazonaws.com/v1",
    "https://abc.execute-api.us-east-1.amazonaws.com/prod",
    "https://abc.lambda-url.us-east-1.on.aws",
    "https://ec2-1-2-3-4.compute-1.amazonaws.com:8000/v1",
    "https://bedrock-runtime.us-east-1.amazonaws.com.my-company.com",
    "https://bedrock-runtime.my-lb-123.us-east-1.elb.amazonaws.com",
    "https://storage.googleapis.com/bucket",
    "https://my-gateway.azure-api.net/openai",
    "https://me.inference.ml.azure.com/v1",
    "https://me.azurewebsites.net/v1",
    "https://notapi.x.ai/v1",
    "https://api.x.ai.my-company.com/v1",
]


@pytest.mark.parametrize(("address", "vendor"), ADDRESSES)
def test_host_of_an_api_belongs_to_its_vendor(address: str, vendor: str) -> None:
    """In every partition, and through a private endpoint: the vendor bills the call."""
    assert vendor_at(address) == vendor


@pytest.mark.parametrize("address", OWN_SERVERS)
def test_own_server_at_a_cloud_has_no_vendor(address: str) -> None:
    """A load balancer in front of rented GPUs must not get the price of a public model."""
    assert vendor_at(address) is None
    model = ScriptedModel([], "gpt-4o", base_url=address)
    terms = terms_of(model)
    assert (terms.vendor, terms.own_class) == (None, "ScriptedModel")
    found = Prices().quote(billable_call("gpt-4o", "x", Usage(input=1), None, terms))
    assert (found.price, found.at_most) == (None, None)


@pytest.mark.parametrize(
    ("host", "region"),
    [
        ("vpce-0a1b-2c3d.bedrock-runtime.eu-west-1.vpce.amazonaws.com", "eu-west-1"),
        ("bedrock-runtime.eusc-de-east-1.amazonaws.eu", "eusc-de-east-1"),
        ("bedrock-mantle.eu-north-1.api.aws", "eu-north-1"),
        ("us-east5-aiplatform-mine.p.googleapis.com", "us-east5"),
    ],
)
def test_region_is_read_from_each_host_of_a_vendor(host: str, region: str) -> None:
    """A host without its region would be priced as the region on the list."""
    assert region_of("m", [host]) == region


@pytest.mark.parametrize(
    "region", ["eusc-de-east-1", "us-gov-west-1", "cn-north-1", "us-iso-east-1"]
)
def test_price_in_another_partition_is_unknown(region: str) -> None:
    """The lists contain no prices of sovereign clouds, and nothing bounds them."""
    model = "global.anthropic.claude-sonnet-4-5-20250929-v1:0"
    assert (premium("aws", model, region), highest_premium("aws", region)) == (None, None)
