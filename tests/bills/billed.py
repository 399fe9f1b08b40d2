"""The calls that vendors bill, and the rates at which they do."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.wire.usages import Bill

Vendor: TypeAlias = Literal["openai", "anthropic", "openrouter", "litellm"]
Part: TypeAlias = Literal["input", "cache_read", "cache_write", "cache_write_1h", "output"]
MILLION: Final = 1_000_000
EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)


def rates(*usd: str) -> Mapping[Part, Decimal]:
    """Rates in USD per million tokens, in the order of `Part`."""
    parts: tuple[Part, ...] = ("input", "cache_read", "cache_write", "cache_write_1h", "output")
    return dict(zip(parts, map(Decimal, usd), strict=True))


# Read 2026-11-29 from https://developers.openai.com/api/docs/pricing,
# https://platform.claude.com/docs/en/about-claude/pricing and https://openrouter.ai/models.
RATES: Final[Mapping[str, Mapping[Part, Decimal]]] = {
    "gpt-4o": rates("2.50", "1.25", "0", "0", "10"),
    "gpt-4o-mini": rates("0.15", "0.075", "0", "0", "0.60"),
    "claude-sonnet-4-5": rates("3", "0.30", "3.75", "6", "15"),
    "claude-haiku-4-5": rates("1", "0.10", "1.25", "2", "5"),
    "openai/gpt-4o-mini": rates("0.15", "0.075", "0", "0", "0.60"),
    "gpt-5": rates("1.25", "0.125", "0", "0", "10"),
    "gpt-5-mini": rates("0.25", "0.025", "0", "0", "2"),
    "gemini-2.5-flash-lite": rates("0.10", "0.01", "0", "0", "0.40"),
    # A model that is on no list yet.
    "gpt-next-preview": rates("4", "1", "0", "0", "20"),
    # A name that a gateway gives to a model.
    "smart": rates("0.15", "0.075", "0", "0", "0.60"),
}


@dataclass(frozen=True, kw_only=True)
class BilledCall:
    """One call on a bill."""

    vendor: Vendor
    model: str
    identity: str
    started: float
    """Seconds since 1970."""
    ended: float
    bill: Bill
    status: Literal["success", "failure"] = "success"

    @property
    def at(self) -> datetime:
        """When it ended, in UTC."""
        return EPOCH + timedelta(seconds=self.ended)

    def day(self, zone: timezone = timezone.utc) -> date:
        """The day on which it ended."""
        return self.at.astimezone(zone).date()

    @property
    def tokens(self) -> Mapping[Part, int]:
        """Its tokens by what they cost."""
        bill = self.bill
        return {
            "input": bill.input - bill.read - bill.write,
            "cache_read": bill.read,
            "cache_write": bill.write - bill.write_1h,
            "cache_write_1h": bill.write_1h,
            "output": bill.output,
        }

    def cost_of(self, part: Part) -> Decimal:
        """USD of a part of its tokens."""
        return RATES[self.model][part] * self.tokens[part] / MILLION

    @property
    def cost(self) -> Decimal:
        """USD, exactly."""
        return sum((self.cost_of(part) for part in self.tokens), Decimal(0))
