"""The one place that says what a call used: raw usage of any vendor in, one kind of record out.

Live streams, spans and imported files all pass it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from otel_limits.core.usage import NOTHING_REPORTED, Sure, Usage, UsageRecord
from otel_limits.usage import fields
from otel_limits.usage.fields import Fields
from otel_limits.usage.rules import Rule, rule_of_provider, rule_of_span

HOLDERS: Final = ("usage", "usage_metadata", "usageMetadata", "metrics")
"""Where a response has its usage; Ollama's has it in itself."""


def record_of_usage(raw: object, provider: str = "unknown") -> UsageRecord:
    """Read the usage of one response.

    Args:
        raw: What the vendor or its client says: a dictionary or an object of the client library.
        provider: The module of the framework that talks to the vendor, such as `bedrock`.
    """
    return _record(Fields(raw), rule_of_provider(provider))


def record_of_response(response: object, provider: str = "unknown") -> UsageRecord:
    """Read the usage that is within a whole response, of a client library or as JSON."""
    for name in HOLDERS:
        held = (
            response.get(name) if isinstance(response, Mapping) else getattr(response, name, None)
        )
        if held is not None:
            return record_of_usage(held, provider)
    return record_of_usage(response, provider)


def record_of_span(attributes: Mapping[str, Any], scope: str = "") -> UsageRecord:
    """Read the usage that a span has in its attributes.

    Args:
        attributes: Those of the span; what is not about usage is passed over.
        scope: The instrumentation scope that the span is of.
    """
    told = fields.as_said(attributes)
    return _record(Fields(told), rule_of_span(scope, told)) if told else NOTHING_REPORTED


def completed(record: UsageRecord, input_estimate: int, output_estimate: int) -> Usage:
    """Put estimates in the place of what the vendor did not say.

    It is at least what is readable, and at least the vendor's total.

    Args:
        record: What it said.
        input_estimate: Tokens that the request has, about.
        output_estimate: Tokens that were streamed, about.
    """
    known = record.usage
    if record.sure == "measured":
        return known
    sent = known.input if record.has_input else max(known.input, input_estimate)
    output = known.output if record.has_output else max(known.output, output_estimate)
    # What the total has beyond both parts was billed as well.
    rest = max(0, (record.total or 0) - sent - output)
    # Nobody knows where the rest belongs: to what is missing, and rather to the longer part.
    if record.has_input:
        return _changed(known, sent, output + rest)
    return _changed(known, sent + rest, output)


def _changed(usage: Usage, sent: int, output: int) -> Usage:
    return Usage(
        input=sent,
        output=output,
        cache_read=usage.cache_read,
        cache_write=usage.cache_write,
        cache_write_1h=usage.cache_write_1h,
        reasoning=usage.reasoning,
        input_audio=usage.input_audio,
        output_audio=usage.output_audio,
        web_searches=usage.web_searches,
    )


NEEDED: Final = (fields.INPUT, fields.OUTPUT, fields.TOTAL)
"""Without any of these, nothing was reported."""


def _record(found: Fields, rule: Rule) -> UsageRecord:
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
    if output is not None and found.is_of_gemini:  # its total may be of less than its parts
        output = max(output, least)
    if sent is None or sent < cached:  # only a total can say less than the part that was cached
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
    """Tokens put in a cache: the vendor's sum, or that of its parts where it sends no sum."""
    by_ttl = [found.count(kind) or 0 for kind in (fields.CACHE_WRITE_5M, fields.CACHE_WRITE_1H)]
    return max(found.count(fields.CACHE_WRITE) or 0, sum(by_ttl))


def _written_for_an_hour(found: Fields, written: int) -> int | None:
    """Those of them that stay for an hour: where only the others are told, the rest."""
    told, others = found.count(fields.CACHE_WRITE_1H), found.count(fields.CACHE_WRITE_5M)
    if told is not None or others is None:
        return told
    # cacheDetails are a "breakdown of cache writes by TTL":
    # https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_TokenUsage.html.
    return written - others


def _with_thoughts(
    found: Fields, output: int | None, thoughts: int | None, total: int | None
) -> int | None:
    """Add what the model thought with, where that is beside the output."""
    if output is None or not thoughts or not _is_beside(found, thoughts, output, total):
        return output
    return output + thoughts


def _is_beside(found: Fields, thoughts: int, output: int, total: int | None) -> bool:
    """Tell whether reasoning is beside the output: Gemini's, and what is more than the whole."""
    return found.is_of_gemini or (total is None and thoughts > output)


def _is_outside(
    rule: Rule,
    sent: int | None,
    output: int | None,
    total: int | None,
    cached: int,
    thoughts: int,
) -> bool:
    """Tell whether the cached tokens have to be added to the input."""
    if sent is None or not cached:
        return False
    if cached > sent:  # a part cannot be more than the whole, whatever the rule
        return True
    if rule.cached != "by total":
        return rule.cached == "outside"
    if output is None or total is None:
        return False
    # Whoever leaves cached tokens out of the input may leave reasoning out of the output as well.
    return sent + output + cached in (total, total - thoughts)


def _settled(
    rule: Rule, sent: int | None, output: int | None, total: int | None, outside: int
) -> tuple[int | None, int | None, Sure]:
    """Let the total decide what it can: a part that is missing, or reasoning that is in no part."""
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
