"""All vendors, and the tables that follow from their records."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from otel_limits.vendors.amazon import AMAZON, SAGEMAKER
from otel_limits.vendors.anthropic import ANTHROPIC
from otel_limits.vendors.deepseek import DEEPSEEK
from otel_limits.vendors.google import GOOGLE
from otel_limits.vendors.local import LOCAL_SERVERS, OLLAMA_CLOUD
from otel_limits.vendors.minimax import MINIMAX
from otel_limits.vendors.openai import AZURE, OPENAI
from otel_limits.vendors.others import OTHERS

if TYPE_CHECKING:
    from otel_limits.vendors.vendor import MediaRule, UsageRule, Vendor

VENDORS: Final[tuple[Vendor, ...]] = (
    ANTHROPIC, GOOGLE, AMAZON, SAGEMAKER, OPENAI, AZURE, LOCAL_SERVERS, OLLAMA_CLOUD, DEEPSEEK,
    MINIMAX, *OTHERS,
)  # fmt: skip

BY_NAME: Final[Mapping[str, Vendor]] = {each.name: each for each in VENDORS}

CANONICAL: Final[Mapping[str, str]] = {
    alias: each.name for each in VENDORS for alias in each.aliases
}
"""Vendors by other names than those on the price list."""

HOSTS: Final[tuple[tuple[re.Pattern[str], str], ...]] = tuple(
    (re.compile(rf"(?:.+\.)?{re.escape(host).replace(re.escape('*'), '[a-z0-9-]+')}"), each.name)
    for each in VENDORS
    for host in each.hosts
)
"""Patterns of hosts, and their vendors. At any other host, such as a gateway, the vendor is the one
that the framework's model class is made for."""

CLASSES: Final[Mapping[str, Vendor]] = {module: each for each in VENDORS for module in each.classes}
"""Vendors by a framework's module for the provider."""

USAGE_RULES: Final[Mapping[str, UsageRule]] = {
    module: rule for each in VENDORS for module, rule in each.classes.items()
}
"""By a framework's module for the provider."""

MEDIA_RULES: Final[tuple[MediaRule, ...]] = tuple(rule for each in VENDORS for rule in each.media)
"""In the order in which models are compared: a newer model's name may contain an older one's."""

APART: Final = frozenset(name for each in VENDORS for name in each.apart)
"""Names of an output that excludes reasoning."""

TOKEN_TOOLS: Final = frozenset(tool for each in VENDORS for tool in each.token_tools)
"""Tools that run at a vendor and cost only tokens."""

UNLISTED: Final = frozenset(each.name for each in VENDORS if not each.is_listed)
GATEWAYS: Final = frozenset(each.name for each in VENDORS if each.is_gateway)

BLOCKED: Final = frozenset({"content_filter", "content_filtered", "guardrail_intervened"})
"""Stop reasons of an answer that a guardrail of the vendor or of a gateway wrote:
<https://platform.openai.com/docs/api-reference/chat/object>,
<https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_Converse.html>."""
