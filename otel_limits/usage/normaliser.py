"""Normalize vendor usage into one record type.

Used for streams, spans and imported files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.usage import NO_USAGE, NOTHING_REPORTED, Sure, Usage, UsageRecord
from otel_limits.usage import fields
from otel_limits.usage.fields import Fields, field_names
from otel_limits.vendors.records import vendors_of_classes
from otel_limits.vendors.vendor import UsageRule

if TYPE_CHECKING:
    from otel_limits.core.events import CallKind

HOLDERS: Final = ("usage", "usage_metadata", "usageMetadata", "metrics")
"""Where a response contains its usage; Ollama's is at the top level."""

COUNTS: Final = fields_of(Usage)

REMEMBERED: Final = 256
"""Cached usages: about as many agents at the same time."""


def record_of_usage(raw: object, provider: str = "unknown") -> UsageRecord:
    """Return the usage of one response.

    Args:
        raw: The usage as sent: a dictionary, or an object of a client library.
        provider: The framework's module for the provider, such as `bedrock`.
    """
    if type(raw) is dict and all(type(count) is int for count in raw.values()):
        return _record_of_counts(tuple(raw.items()), provider)
    return _record(Fields(raw), _rule_of_provider(provider))


# Cached, because the usage of a response is read again to project the next request.
@functools.lru_cache(REMEMBERED)
def _record_of_counts(counts: tuple[tuple[str, int], ...], provider: str) -> UsageRecord:
    return _record(Fields(dict(counts)), _rule_of_provider(provider))


def record_of_response(response: object, provider: str = "unknown") -> UsageRecord:
    """Return the usage within a whole response, from a client library or as JSON."""
    for name in HOLDERS:
        held = (
            response.get(name) if isinstance(response, Mapping) else getattr(response, name, None)
        )
        if held is not None:
            return record_of_usage(held, provider)
    return record_of_usage(response, provider)


def record_of_span(attributes: Mapping[str, Any], scope: str = "") -> UsageRecord:
    """Return the usage in the attributes of a span.

    Args:
        attributes: All attributes of the span.
        scope: Its instrumentation scope.
    """
    told = fields.as_said(attributes)
    return _record(Fields(told), _rule_of_span(scope, told)) if told else NOTHING_REPORTED


def combined(record: UsageRecord, part: UsageRecord) -> UsageRecord:
    """Return the usage of a call that is reported in parts, with one more part."""
    if "missing" in (record.sure, part.sure):
        return part if record.sure == "missing" else record
    both = (record, part)
    is_measured = all(each.sure == "measured" for each in both)
    return UsageRecord(
        usage=_sum(record.usage, part.usage),
        sure="measured" if is_measured else "partial",
        has_input=all(each.has_input for each in both),
        has_output=all(each.has_output for each in both),
        total=sum(each.total or each.usage.total for each in both),
        reported=_sum(record.reported or NO_USAGE, part.reported or NO_USAGE),
        tier=part.tier or record.tier,
    )


def _sum(usage: Usage, more: Usage) -> Usage:
    """Return the sum of two usages; a part that neither reports stays unknown."""
    both = {each.name: (getattr(usage, each.name), getattr(more, each.name)) for each in COUNTS}
    sums: dict[str, Any] = {
        name: None if known == (None, None) else sum(each or 0 for each in known)
        for name, known in both.items()
    }
    return Usage(**sums)


def counted(
    record: UsageRecord,
    input_estimate: int,
    output_estimate: Callable[[], int],
    *,
    failed: bool,
    billed: bool,
) -> tuple[CallKind, Usage, bool]:
    """Return the kind of a call that has ended, its usage, and whether that is an estimate.

    Args:
        record: The reported usage.
        input_estimate: Estimated tokens of the request.
        output_estimate: Estimates the tokens of the answer, which takes time.
        failed: The call ended without a response.
        billed: The provider had accepted it: then it bills a failed call, too.
    """
    is_measured = record.sure == "measured"
    is_estimated = billed and not is_measured
    usage = record.usage
    if is_estimated:
        usage = completed(record, input_estimate, output_estimate())
    if failed:
        return "failed", usage, is_estimated
    if not is_measured:
        return "unmeasured", usage, is_estimated
    return "measured" if usage.total else "zero_token", usage, is_estimated


def completed(record: UsageRecord, input_estimate: int, output_estimate: int) -> Usage:
    """Return the usage with estimates for missing parts.

    It is at least the readable part, and at least the vendor's total.

    Args:
        record: The reported usage.
        input_estimate: Estimated tokens of the request.
        output_estimate: Estimated tokens streamed so far.
    """
    known = record.usage
    if record.sure == "measured":
        return known
    sent = known.input if record.has_input else max(known.input, input_estimate)
    output = known.output if record.has_output else max(known.output, output_estimate)
    # The rest of the total was billed as well.
    rest = max(0, (record.total or 0) - sent - output)
    # The rest is assigned to the missing part, or else to the larger one.
    if record.has_input:
        return replace(known, input=sent, output=output + rest)
    return replace(known, input=sent + rest, output=output)


NEEDED: Final = (fields.INPUT, fields.OUTPUT, fields.TOTAL)
"""Without any of these, no usage was reported."""


def _record(found: Fields, rule: UsageRule) -> UsageRecord:
    if not any(map(found.is_named, NEEDED)):
        return NOTHING_REPORTED
    sent, output = found.count(fields.INPUT), found.count(fields.OUTPUT)
    total = found.count(fields.TOTAL)
    read, written = found.count(fields.CACHE_READ) or 0, _written(found)
    reported = Usage(input=sent or 0, output=output or 0, cache_read=read, cache_write=written)
    if rule.zeros_are_made_up and not (sent or output or total):
        return UsageRecord(reported=reported, total=total)
    cached = read + written
    thoughts = found.count(fields.REASONING)
    outside = cached if _is_outside(rule, sent, output, total, cached, thoughts or 0) else 0
    if sent is not None:
        sent += outside + (found.count(fields.TOOL_PROMPT) or 0)
    least = max(output or 0, thoughts or 0)
    output = _with_thoughts(found, output, thoughts, total)
    sent, output, sure = _settled(rule, sent, output, total, outside)
    if output is not None and found.is_reasoning_apart:  # the total may be of less than the parts
        output = max(output, least)
    if sent is None or sent < cached:  # only a total can be less than its cached part
        sent, sure = None, "partial"
    return UsageRecord(
        usage=Usage(
            input=cached if sent is None else sent,
            output=least if output is None else output,
            cache_read=read,
            cache_write=written,
            cache_write_1h=_written_for_an_hour(found, written),
            reasoning=thoughts if output is None or least <= output else None,
            input_audio=found.count(fields.INPUT_AUDIO),
            output_audio=found.count(fields.OUTPUT_AUDIO),
            web_searches=found.count(fields.WEB_SEARCHES),
        ),
        sure=sure,
        has_input=sent is not None,
        has_output=output is not None,
        total=total,
        reported=reported,
        tier=found.tier,
    )


def _written(found: Fields) -> int:
    """Return the tokens written to a cache: the vendor's sum, or the sum of the parts."""
    by_ttl = [found.count(kind) or 0 for kind in (fields.CACHE_WRITE_5M, fields.CACHE_WRITE_1H)]
    return max(found.count(fields.CACHE_WRITE) or 0, sum(by_ttl))


def _written_for_an_hour(found: Fields, written: int) -> int | None:
    """Return those written for an hour; if only the others are reported, the rest."""
    told, others = found.count(fields.CACHE_WRITE_1H), found.count(fields.CACHE_WRITE_5M)
    if told is not None or others is None:
        return told
    # cacheDetails are a "breakdown of cache writes by TTL":
    # https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_TokenUsage.html.
    return written - others


def _with_thoughts(
    found: Fields, output: int | None, thoughts: int | None, total: int | None
) -> int | None:
    """Add reasoning tokens that are not part of the output."""
    if output is None or not thoughts:
        return output
    # Gemini reports them separately, as does a provider that reports more than the whole output.
    is_separate = found.is_reasoning_apart or (total is None and thoughts > output)
    return output + thoughts if is_separate else output


def _is_outside(
    rule: UsageRule,
    sent: int | None,
    output: int | None,
    total: int | None,
    cached: int,
    thoughts: int,
) -> bool:
    """Return whether cached tokens must be added to the input."""
    if sent is None or not cached:
        return False
    if cached > sent:  # a part cannot be more than the whole
        return True
    if rule.cached != "by total":
        return rule.cached == "outside"
    if output is None or total is None:
        return False
    # A vendor that excludes cached tokens from the input may exclude reasoning from the output,
    # too.
    return sent + output + cached in (total, total - thoughts)


def _settled(
    rule: UsageRule, sent: int | None, output: int | None, total: int | None, outside: int
) -> tuple[int | None, int | None, Sure]:
    """Use the total to find a missing part, or unassigned reasoning."""
    if total is None:
        return sent, output, "measured" if None not in (sent, output) else "partial"
    if sent is None and output is None:
        return None, None, "partial"
    if sent is None or output is None:
        rest = total - (sent or 0) - (output or 0)
        if rest <= 0 or (outside and rule.total_omits_cache):
            return sent, output, "partial"
        return (rest if sent is None else sent), (rest if output is None else output), "measured"
    is_short = total > sent + output or (rule.total_is_final and total >= sent)
    return sent, (total - sent if is_short else output), "measured"


# --- how each vendor and instrumentation counts ---------------------------------------------------

UNKNOWN: Final = UsageRule("by total")

# A framework's own spans can contain zeros if the vendor sent no usage, as in Strands'
# event_loop/streaming.py.
BY_CONVENTION: Final = UsageRule("inside", zeros_are_made_up=True)
"""OpenTelemetry semantic conventions for generative AI: input_tokens "SHOULD include all types of
input tokens, including cached tokens"; OpenInference counts the same way."""

BY_NOTHING: Final = UsageRule("by total", zeros_are_made_up=True)
"""Spans without any sign of how they count."""


def _rule_of_provider(provider: str) -> UsageRule:
    """Return the rule of a vendor, by the framework's module for it."""
    vendor = vendors_of_classes().get(provider)
    return UNKNOWN if vendor is None else vendor.classes[provider]


def _rule_of_span(scope: str, attributes: Mapping[str, object]) -> UsageRule:
    """Return the rule of an instrumentation."""
    names = field_names()
    for name, rule in names.scopes.items():
        if scope == name or scope.startswith(f"{name}."):
            return rule
    return BY_NOTHING if names.conventional.isdisjoint(attributes) else BY_CONVENTION
