"""DeepSeek, whose API follows OpenAI's format."""

from __future__ import annotations

from typing import Final

from otel_limits.vendors.vendor import PRICE_LIST, Vendor

DEEPSEEK: Final = Vendor(
    name="deepseek", hosts=("api.deepseek.com",), sources={"hosts": PRICE_LIST}
)
