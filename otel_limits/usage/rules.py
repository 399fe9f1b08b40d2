"""How each vendor and instrumentation counts: which parts its usage includes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from otel_limits.usage.fields import field_names
from otel_limits.vendors.records import vendors_of_classes
from otel_limits.vendors.vendor import UsageRule

UNKNOWN: Final = UsageRule("by total")

# A framework's own spans can contain zeros if the vendor sent no usage, as in Strands'
# event_loop/streaming.py.
BY_CONVENTION: Final = UsageRule("inside", zeros_are_made_up=True)
"""OpenTelemetry semantic conventions for generative AI: input_tokens "SHOULD include all types of
input tokens, including cached tokens"; OpenInference counts the same way."""

BY_NOTHING: Final = UsageRule("by total", zeros_are_made_up=True)
"""Spans without any sign of how they count."""


def rule_of_provider(provider: str) -> UsageRule:
    """Return the rule of a vendor, by the framework's module for it."""
    vendor = vendors_of_classes().get(provider)
    return UNKNOWN if vendor is None else vendor.classes[provider]


def rule_of_span(scope: str, attributes: Mapping[str, object]) -> UsageRule:
    """Return the rule of an instrumentation."""
    names = field_names()
    for name, rule in names.scopes.items():
        if scope == name or scope.startswith(f"{name}."):
            return rule
    return BY_NOTHING if names.conventional.isdisjoint(attributes) else BY_CONVENTION
