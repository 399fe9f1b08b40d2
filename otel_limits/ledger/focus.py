"""Writes model calls as FOCUS 1.2, which FinOps tools read: https://focus.finops.org.

A row is the charge of one meter of a model, e.g. its output tokens, for a day in UTC. Each has one
unit price: tokens at another, e.g. of a long prompt, are another row.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal, localcontext
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import sqlalchemy as sa

from otel_limits.core.price import Price
from otel_limits.core.terms import BEDROCK, canonical, vendor_of
from otel_limits.core.usage import EXACT, NO_COST, Usage
from otel_limits.ledger.file_export import PORTION, ExportedColumn
from otel_limits.ledger.options import KEY_PREFIX
from otel_limits.ledger.repricing import call_of
from otel_limits.ledger.rows import picodollars, time_of
from otel_limits.ledger.schema import CALLS, IS_UNPRICED, MODEL_CALL_TABLE
from otel_limits.ledger.selection import Joins, Selection, audit_keys

if TYPE_CHECKING:
    from otel_limits.core.price import Quote
    from otel_limits.core.price_lookup import Prices

UNDIVIDED: Final = "Undivided"
"""Meter of calls whose recorded price is not that of the present price list, so that it cannot be
divided; one unit is one USD."""

Cause = Literal["policy", "changed", "unlisted", "stated"]
"""Why the price of a call cannot be divided: it is of another policy file, not the current one, of
a model without a current one, or a cost that the response states."""

SERVICES: Final = {
    "anthropic": ("Anthropic", "Claude API"),
    "aws": ("AWS", "Amazon Bedrock"),
    "azure": ("Microsoft", "Azure OpenAI"),
    "google": ("Google", "Gemini API"),
    "openai": ("OpenAI", "OpenAI API"),
}
"""Display names of providers and their services; others have their own name for both."""

SUB_ACCOUNT_TYPE: Final = "Audit Key"
BILLING_ACCOUNT_TYPE: Final = "Billing Account"

COLUMNS: Final = {
    "BilledCost": "decimal",
    "BillingAccountId": "text",
    "BillingAccountName": "text",
    "BillingAccountType": "text",
    "BillingCurrency": "text",
    "BillingPeriodEnd": "midnight",
    "BillingPeriodStart": "midnight",
    "ChargeCategory": "text",
    "ChargeClass": "text",
    "ChargeDescription": "text",
    "ChargeFrequency": "text",
    "ChargePeriodEnd": "midnight",
    "ChargePeriodStart": "midnight",
    "ConsumedQuantity": "decimal",
    "ConsumedUnit": "text",
    "ContractedCost": "decimal",
    "ContractedUnitPrice": "decimal",
    "EffectiveCost": "decimal",
    "InvoiceIssuerName": "text",
    "ListCost": "decimal",
    "ListUnitPrice": "decimal",
    "PricingCategory": "text",
    "PricingQuantity": "decimal",
    "PricingUnit": "text",
    "ProviderName": "text",
    "PublisherName": "text",
    "RegionId": "text",
    "RegionName": "text",
    "ServiceCategory": "text",
    "ServiceName": "text",
    "ServiceSubcategory": "text",
    "SkuId": "text",
    "SkuMeter": "text",
    "SkuPriceDetails": "text",
    "SkuPriceId": "text",
    "SubAccountId": "text",
    "SubAccountName": "text",
    "SubAccountType": "text",
    "Tags": "text",
    "x_Agent": "text",
    "x_Model": "text",
}
"""Columns of the specification that apply, with their kinds, then our own. The columns on
commitments, capacity, invoices, resources and other currencies do not apply."""

FIELDS: Final = tuple(
    ExportedColumn(name, kind, None)  # type: ignore[arg-type]
    for name, kind in COLUMNS.items()
)


@dataclass(frozen=True, slots=True)
class MeterCharge:
    """All that distinguishes one row from another."""

    day: int
    agent: str
    model: str
    provider: str
    """By its canonical name."""
    region: str | None
    tags: str
    """Audit keys, as JSON."""
    meter: str
    price: Decimal
    """USD of one pricing unit."""


class Charges:
    """Quantities of calls, by charge.

    Attributes:
        quantities: Tokens, requests or searches; picodollars of undivided calls.
        unpriced: Calls without a known price, which are in no charge.
        undivided: Calls whose price cannot be divided, by cause.
    """

    def __init__(self) -> None:
        """Start without calls."""
        self.quantities: defaultdict[MeterCharge, int] = defaultdict(int)
        self.unpriced = 0
        self.undivided: Counter[Cause] = Counter()

    def add(self, row: Any, keys: Sequence[str], prices: Prices) -> None:
        """Add one call."""
        call = call_of(row)
        provider = vendor_of(row.model, call.vendor or canonical(row.provider))
        values = row[-len(keys) :] if keys else ()
        tags = {key: value for key, value in zip(keys, values, strict=True) if value is not None}
        of = (row.day, row.agent, row.model, provider, call.region, json.dumps(tags))
        quote = prices.quote(call, time_of(row.at_us))
        parts = _parts(call.usage, quote.rates or FREE)
        # In a separate context: the application's may round or trap.
        with localcontext(EXACT):
            amount = sum((each.cost for each in parts), NO_COST)
        if quote.price is None or picodollars(amount) != row.price_pico:
            self.undivided[_cause(row, quote)] += 1
            parts = [PricePart(UNDIVIDED, row.price_pico, Decimal(1))]
        for meter, quantity, price in parts:
            self.quantities[MeterCharge(*of, meter, price)] += quantity


def _cause(row: Any, quote: Quote) -> Cause:
    if row.price_source == "policy":
        return "policy"
    if quote.price is None:
        return "unlisted"
    return "stated" if picodollars(quote.price) == row.price_pico else "changed"


class PricePart(NamedTuple):
    """A part of the price of a call."""

    meter: str
    quantity: int
    price: Decimal
    """USD of one pricing unit."""

    @property
    def cost(self) -> Decimal:
        """Its USD."""
        return (self.quantity * self.price).scaleb(METERS[self.meter].exponent)


class Meter(NamedTuple):
    """How the quantity of a meter is written."""

    unit: str
    pricing_unit: str
    exponent: int
    """Power of ten from the quantity to that of the pricing unit."""


PER_TOKEN: Final = Meter("Tokens", "1000000 Tokens", -6)
METERS: Final = {
    "Input": PER_TOKEN,
    "Input audio": PER_TOKEN,
    "Cache read": PER_TOKEN,
    "Cache write": PER_TOKEN,
    "Cache write, 1 hour": PER_TOKEN,
    "Output": PER_TOKEN,
    "Output audio": PER_TOKEN,
    "Requests": Meter("Requests", "Requests", 0),
    "Web searches": Meter("Searches", "Searches", 0),
    UNDIVIDED: Meter("US Dollars", "US Dollars", -12),
}

FREE: Final = Price(input=NO_COST, output=NO_COST)
"""The rates of local models."""


def _parts(usage: Usage, rates: Price) -> list[PricePart]:
    """Divide the price of a call into meters, as `Price.of` adds it up."""
    one_hour, audio = usage.cache_write_1h or 0, usage.input_audio or 0
    fresh = usage.input - usage.cache_read - usage.cache_write - audio
    read, write, kept = rates.cache_rates
    answered = usage.output_audio or 0
    parts = (
        PricePart("Input", fresh, rates.input),
        PricePart("Input audio", audio, rates.input_audio or NO_COST),
        PricePart("Cache read", usage.cache_read, read),
        PricePart("Cache write", usage.cache_write - one_hour, write),
        PricePart("Cache write, 1 hour", one_hour, kept),
        PricePart("Output", usage.output - answered, rates.output),
        PricePart("Output audio", answered, rates.output_audio or NO_COST),
        PricePart("Requests", 1, rates.per_request),
        PricePart("Web searches", usage.web_searches or 0, rates.web_search or NO_COST),
    )
    return [each for each in parts if each.quantity]


NEEDED: Final = (
    CALLS.day, CALLS.at_us, CALLS.agent, CALLS.model, CALLS.provider,
    CALLS.input_tokens, CALLS.output_tokens, CALLS.cache_read_tokens, CALLS.cache_write_tokens,
    CALLS.cache_write_1h_tokens, CALLS.tier, CALLS.price_basis, CALLS.price_pico,
    CALLS.stated_pico, CALLS.price_source,
)  # fmt: skip


def add_calls(
    found: Charges, connection: sa.Connection, selection: Selection, prices: Prices
) -> Iterator[int]:
    """Add the calls of a selection; yields the size of each portion.

    Args:
        found: Receives them.
        connection: The ledger.
        selection: Which calls.
        prices: What calls cost, to divide the recorded prices.
    """
    keys = audit_keys(connection)
    joins = Joins(MODEL_CALL_TABLE)
    columns = [joins.column(KEY_PREFIX + key).label(f"k{n}") for n, key in enumerate(keys)]
    unpriced = joins.select(selection, sa.func.count()).where(IS_UNPRICED)
    found.unpriced = int(connection.execute(unpriced).scalar() or 0)
    statement = joins.select(selection, *NEEDED, *columns).where(CALLS.price_pico.is_not(None))
    rows = connection.execute(statement, execution_options={"yield_per": PORTION})
    for portion in rows.partitions():
        for row in portion:
            found.add(row, keys, prices)
        yield len(portion)


def rows_of(found: Charges, account: str, sub_account_key: str) -> Iterator[tuple[Any, ...]]:
    """Iterate over the rows of charges, in the order of `FIELDS`.

    Args:
        found: The charges.
        account: ID of the billing account.
        sub_account_key: Audit key whose value is the sub-account.
    """
    place = {meter: number for number, meter in enumerate(METERS)}
    in_order = sorted(
        found.quantities.items(),
        key=lambda each: (
            *(getattr(each[0], name) or "" for name in ORDER),
            place[each[0].meter],
            each[0].price,
        ),
    )
    for charge, quantity in in_order:
        values = _columns(charge, quantity, account, sub_account_key)
        yield tuple(values.get(name) for name in COLUMNS)


ORDER: Final = ("day", "agent", "model", "provider", "region", "tags")


def _columns(
    charge: MeterCharge, quantity: int, account: str, sub_account_key: str
) -> dict[str, Any]:
    meter = METERS[charge.meter]
    day = date(1970, 1, 1) + timedelta(days=charge.day)
    month = day.replace(day=1)
    provider, service = SERVICES.get(charge.provider, (charge.provider, charge.provider))
    maker = BEDROCK.match(charge.model)
    publisher = maker[2] if charge.provider == "aws" and maker else charge.provider
    tags = json.loads(charge.tags)
    priced = Decimal(quantity).scaleb(meter.exponent)
    sub_account = tags.get(sub_account_key)
    cost = PricePart(charge.meter, quantity, charge.price).cost
    sku = f"{charge.provider}/{charge.model}/{charge.meter}"
    return {
        **dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), cost),
        **dict.fromkeys(("ContractedUnitPrice", "ListUnitPrice"), charge.price),
        "BillingAccountId": account,
        "BillingAccountType": BILLING_ACCOUNT_TYPE,
        "BillingCurrency": "USD",
        "BillingPeriodEnd": (month + timedelta(days=31)).replace(day=1),
        "BillingPeriodStart": month,
        "ChargeCategory": "Usage",
        "ChargeDescription": f"{charge.meter} of {charge.model}",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodEnd": day + timedelta(days=1),
        "ChargePeriodStart": day,
        "ConsumedQuantity": Decimal(quantity).scaleb(
            meter.exponent if meter.unit == meter.pricing_unit else 0
        ),
        "ConsumedUnit": meter.unit,
        "InvoiceIssuerName": provider,
        "PricingCategory": "Standard",
        "PricingQuantity": priced,
        "PricingUnit": meter.pricing_unit,
        "ProviderName": provider,
        "PublisherName": SERVICES.get(publisher, (publisher,))[0],
        "RegionId": charge.region,
        "RegionName": charge.region,
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": service,
        "ServiceSubcategory": "Generative AI",
        "SkuId": sku,
        "SkuMeter": charge.meter,
        "SkuPriceDetails": json.dumps({"x_Model": charge.model}),
        "SkuPriceId": f"{sku}/{charge.price.normalize():f}",
        "SubAccountId": sub_account,
        "SubAccountName": sub_account,
        "SubAccountType": None if sub_account is None else SUB_ACCOUNT_TYPE,
        "Tags": charge.tags if tags else None,
        "x_Agent": charge.agent,
        "x_Model": charge.model,
    }
