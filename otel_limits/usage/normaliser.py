"""Normalize vendor usage into one record type, with the fields that decide its price.

Used for streams, spans and imported files.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from otel_limits.core.labels import clean
from otel_limits.core.price import (
    COST_HEADER,
    INSTRUMENTATION,
    OWN_COST,
    OWN_COST_BY,
    SEARCH_SIZE,
    SPEED,
)
from otel_limits.core.usage import NO_USAGE, NOTHING_REPORTED, Sure, Unplaced, Usage, UsageRecord
from otel_limits.usage import fields
from otel_limits.usage.fields import INPUT, OUTPUT, TOTAL, Doubt, Fields, field_names, within_usage
from otel_limits.vendors.facts import facts
from otel_limits.vendors.records import UsageRule, cost_rules, vendors_of_classes

if TYPE_CHECKING:
    from otel_limits.core.events import CallKind


# --- one record of any usage ----------------------------------------------------------------------

HOLDERS: Final = ("usage", "usage_metadata", "usageMetadata", "metrics")
"""Where a response contains its usage; Ollama's is at the top level."""

COUNTS: Final = fields_of(Usage)

REMEMBERED: Final = 256
"""Cached usages: about as many agents at the same time."""


def record_of_usage(raw: object, provider: str = "unknown", model: str = "unknown") -> UsageRecord:
    """Return the usage of one response.

    Args:
        raw: The usage as sent: a dictionary, or an object of a client library.
        provider: The framework's module for the provider, such as `bedrock`.
        model: The model ID.
    """
    if type(raw) is dict and all(type(count) is int for count in raw.values()):
        return _record_of_counts(tuple(raw.items()), provider, model)
    return _with_billing(_record(Fields(raw), _rule_of_provider(provider, model)), billing_in(raw))


def completed_by(record: UsageRecord, raw: object) -> UsageRecord:
    """Return a record with what the vendor's own usage adds: the served tier, and stated costs.

    Args:
        record: The usage as the framework hands it on.
        raw: The vendor's, if it was seen.
    """
    if raw is None:
        return record
    tier = Fields(raw).tier
    return replace(record, tier=tier or record.tier, billing={**record.billing, **billing_in(raw)})


def _with_billing(record: UsageRecord, billing: Mapping[str, object]) -> UsageRecord:
    return replace(record, billing=billing) if billing else record


# Cached, because the usage of a response is read again to project the next request.
@functools.lru_cache(REMEMBERED)
def _record_of_counts(
    counts: tuple[tuple[str, int], ...], provider: str, model: str
) -> UsageRecord:
    raw = dict(counts)
    return _with_billing(_record(Fields(raw), _rule_of_provider(provider, model)), billing_in(raw))


def record_of_response(
    response: object, provider: str = "unknown", model: str = "unknown"
) -> UsageRecord:
    """Return the usage within a whole response, from a client library or as JSON."""
    for name in HOLDERS:
        held = (
            response.get(name) if isinstance(response, Mapping) else getattr(response, name, None)
        )
        if held is not None:
            return record_of_usage(held, provider, model)
    return record_of_usage(response, provider, model)


def record_of_span(
    attributes: Mapping[str, Any],
    scope: str = "",
    provider: str = "unknown",
    model: str = "unknown",
) -> UsageRecord:
    """Return the usage in the attributes of a span.

    Args:
        attributes: All attributes of the span.
        scope: Its instrumentation scope.
        provider: The provider that it names.
        model: The model that it names.
    """
    told = fields.as_said(attributes)
    if not told:
        return NOTHING_REPORTED
    record = _record(Fields(told, is_span=True), _rule_of_span(scope, told, provider, model))
    return _with_billing(record, billing_in_span(attributes))


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
        unplaced=part.unplaced
        if record.unplaced is None
        else record.unplaced + part.unplaced
        if part.unplaced
        else record.unplaced,
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
        kind: CallKind = "estimated" if is_estimated and usage.total else "unmeasured"
        return kind, usage, is_estimated
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


NEEDED: Final = (INPUT, OUTPUT, TOTAL)
"""Without any of these, no usage was reported."""


def _record(found: Fields, rule: UsageRule) -> UsageRecord:
    if not any(map(found.is_named, NEEDED)):
        return _nothing_understood(found)
    sent, output, total = (found.count(kind) for kind in NEEDED)
    # An intersection is of both.
    spoken = found.count(fields.CACHED_AUDIO) or 0
    read, written = max(found.count(fields.CACHE_READ) or 0, spoken), _written(found)
    reported = Usage(input=sent or 0, output=output or 0, cache_read=read, cache_write=written)
    if rule.zeros_are_made_up and not (sent or output or total):
        return replace(_nothing_understood(found), reported=reported, total=total)
    thoughts = found.count(fields.REASONING)
    placed = _placement(found, rule, read + written, thoughts or 0)
    if sent is not None:
        sent += placed.cached + (found.count(fields.TOOL_PROMPT) or 0)
    elif (fresh := found.count(fields.FRESH)) is not None:
        sent = fresh + read + written
    least = max(output or 0, thoughts or 0)
    if output is not None:
        output += placed.thoughts
    sent, output, sure, rest = _settled(rule, sent, output, total, placed.cached)
    if output is not None and found.is_reasoning_apart:  # the total may be of less than the parts
        output = max(output, least)
    if sent is None or sent < read + written:  # only a total can be less than its cached part
        sent, sure = None, "partial"
    usage = Usage(
        input=read + written if sent is None else sent,
        output=least if output is None else output,
        cache_read=read,
        cache_write=written,
        cache_write_1h=_written_for_an_hour(found, written),
        reasoning=thoughts if output is None or least <= output else None,
        input_audio=max(found.count(fields.INPUT_AUDIO) or 0, spoken)
        if spoken
        else found.count(fields.INPUT_AUDIO),
        output_audio=found.count(fields.OUTPUT_AUDIO),
        web_searches=found.count(fields.WEB_SEARCHES),
    )
    return _without_doubts(
        UsageRecord(
            usage=usage,
            sure=sure,
            has_input=sent is not None,
            has_output=output is not None,
            total=total,
            reported=reported,
            tier=found.tier,
        ),
        found,
        rule,
        placed,
        rest,
    )


def _nothing_understood(found: Fields) -> UsageRecord:
    """Return the record of a usage without input, output and total, which may have other counts."""
    doubts = found.doubts(())
    if not doubts:
        return NOTHING_REPORTED
    names = _names_of(doubts)
    sent = sum(each.tokens for each in doubts if each.side == INPUT)
    unplaced = Unplaced(
        names=names,
        reason=NO_RATE.format(", ".join(names)),
        more_input=sent,
        more_output=sum(each.tokens for each in doubts) - sent,
    )
    return replace(NOTHING_REPORTED, unplaced=unplaced)


def _names_of(doubts: Iterable[Doubt]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(clean(each.name) for each in doubts))[:NAMED]


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


class Placement(NamedTuple):
    """Which reported parts are not within the input and the output."""

    cached: int
    """Cached tokens to add to the input."""
    thoughts: int
    """Reasoning tokens to add to the output."""
    is_sure: bool
    """False if neither the total nor any rule decides."""


def _placement(found: Fields, rule: UsageRule, cached: int, thoughts: int) -> Placement:
    """Place cached and reasoning tokens: by the total, or else by the rule."""
    sent, output, total = (found.count(kind) for kind in NEEDED)
    is_apart = thoughts > (output or 0) or found.is_reasoning_apart
    by_rule = Placement(
        cached if sent is not None and (cached > sent or rule.cached == "outside") else 0,
        thoughts if output is not None and is_apart and not rule.total_is_final else 0,
        not cached or rule.cached != "by total" or not rule.may_be_net or cached > (sent or 0),
    )
    if sent is None or output is None:
        return by_rule
    # The gross input next to the net one, as in the details of an emitter that adds them up.
    net = found.detail(INPUT)
    if cached and net is not None and net + cached == sent:
        by_rule = by_rule._replace(cached=0, is_sure=True)
    elif total is None or rule.total_repeats_cache:
        return by_rule
    else:
        sent += found.count(fields.TOOL_PROMPT) or 0
        return _by_total(rule, (sent, output, total), (cached, thoughts), by_rule)
    return by_rule


def _by_total(
    rule: UsageRule, told: tuple[int, int, int], parts: tuple[int, int], by_rule: Placement
) -> Placement:
    sent, output, total = told
    cached, thoughts = parts
    fits = [
        Placement(outside, apart, is_sure=True)
        for outside in {0, cached}
        for apart in {0, thoughts}
        if sent + outside + output + apart == total
        and outside + sent >= cached
        and apart + output >= thoughts
    ]
    # A total without cached tokens does not show where they are.
    if rule.total_omits_cache:
        fits = [each for each in fits if each.cached == by_rule.cached]
    fits.sort(key=lambda each: (each.cached != by_rule.cached, each.thoughts != by_rule.thoughts))
    if not fits:
        return by_rule
    alike = len(fits) > 1 and by_rule not in (
        each._replace(is_sure=by_rule.is_sure) for each in fits
    )
    return fits[0]._replace(is_sure=not alike or by_rule.is_sure)


class Settled(NamedTuple):
    """The two sides of a usage."""

    sent: int | None
    output: int | None
    sure: Sure = "measured"
    rest: int = 0
    """Tokens of the input that are in the total only, and that no rule explains."""


def _settled(
    rule: UsageRule, sent: int | None, output: int | None, total: int | None, outside: int
) -> Settled:
    """Use the total to find a missing part, or a rest that a rule explains."""
    if sent is None or output is None:
        rest = (total or 0) - (sent or 0) - (output or 0)
        if rest <= 0 or sent is output or (outside and rule.total_omits_cache):
            return Settled(sent, output, "partial")
        return Settled(rest if sent is None else sent, rest if output is None else output)
    if total is None or rule.total_repeats_cache:
        return Settled(sent, output)
    if rule.total_is_final and total >= sent:
        return Settled(sent, total - sent)
    rest = max(0, total - sent - output)
    if rule.rest == OUTPUT:
        return Settled(sent, output + rest)
    return Settled(sent + rest, output, rest=rest)


NAMED: Final = 5
"""Names of parts in a reason."""
NO_RATE: Final = "the rate of its {} is unknown"
NO_PLACE: Final = "its input may or may not contain its cached tokens"
NO_REST: Final = "its total has more tokens than its parts"


def _without_doubts(
    record: UsageRecord, found: Fields, rule: UsageRule, placed: Placement, rest: int
) -> UsageRecord:
    """Return a record without the parts that have several counts, and with what is unplaced."""
    usage = record.usage
    cached = usage.cache_read + usage.cache_write
    explained = {INPUT} if set(found.counts(INPUT)) == {usage.input, usage.input - cached} else ()
    doubts = found.doubts(explained)
    if placed.is_sure and not (doubts or rest):
        return record
    names = _names_of(doubts)
    reasons, tokens = [], Counter[str]()
    for each in doubts:
        tokens[each.side] += each.tokens
    if doubts:
        reasons.append(NO_RATE.format(", ".join(names)))
    # Without a total, parts in doubt may be outside of the others.
    left_out = tokens.copy() if record.total is None else Counter[str]()
    if not placed.is_sure:
        reasons.append(NO_PLACE)
        tokens[INPUT] += cached
        left_out[INPUT] += cached
    if rest:
        reasons.append(NO_REST)
        tokens[INPUT if rule.rest == INPUT else ""] += rest
    unplaced = Unplaced(
        names=names,
        reason="; ".join(reasons),
        input=min(tokens[INPUT], usage.input),
        output=min(tokens[OUTPUT], usage.output),
        either=tokens[""],
        more_input=left_out[INPUT],
        more_output=left_out[OUTPUT] + left_out[""],
    )
    # Without the parts in doubt, as no rate may apply to them.
    changes: dict[str, Any] = {}
    for kind, unknown in UNKNOWN_PARTS.items():
        if len(found.counts(kind)) > 1:
            changes |= unknown
    return replace(record, usage=replace(usage, **changes), unplaced=unplaced)


NOTHING_WRITTEN: Final = {"cache_write": 0, "cache_write_1h": None}
UNKNOWN_PARTS: Final[Mapping[str, Mapping[str, Any]]] = {
    fields.CACHE_READ: {"cache_read": 0},
    fields.CACHE_WRITE: NOTHING_WRITTEN,
    fields.CACHE_WRITE_5M: NOTHING_WRITTEN,
    fields.CACHE_WRITE_1H: NOTHING_WRITTEN,
    fields.REASONING: {"reasoning": None},
    fields.INPUT_AUDIO: {"input_audio": None},
    fields.OUTPUT_AUDIO: {"output_audio": None},
}
"""The values of parts with several counts."""


# --- how each vendor and instrumentation counts ---------------------------------------------------

UNKNOWN: Final = UsageRule("by total")

# A framework's own spans can contain zeros if the vendor sent no usage, as in Strands'
# event_loop/streaming.py.
BY_CONVENTION: Final = UsageRule("inside", zeros_are_made_up=True)
"""OpenTelemetry semantic conventions for generative AI: input_tokens "SHOULD include all types of
input tokens, including cached tokens"; OpenInference counts the same way."""

BY_NOTHING: Final = UsageRule("by total", zeros_are_made_up=True)
"""Spans without any sign of how they count."""


def _rule_of_provider(provider: str, model: str) -> UsageRule:
    """Return the rule of a vendor, by the framework's module for it, or of a model's family."""
    vendor = vendors_of_classes().get(provider)
    if vendor is None:
        rule = field_names().scopes.get(provider, UNKNOWN)
    else:
        families = vendor.families.items()
        of_family = next((rule for part, rule in families if part in model.lower()), None)
        rule = of_family or vendor.classes[provider]
    return _for_model(rule, provider, model)


def _rule_of_span(
    scope: str, attributes: Mapping[str, object], provider: str, model: str
) -> UsageRule:
    """Return the rule of an instrumentation, as far as it does not depend on the model."""
    names = field_names()
    rule = BY_NOTHING if names.conventional.isdisjoint(attributes) else BY_CONVENTION
    for name, of_scope in names.scopes.items():
        if scope == name or scope.startswith(f"{name}."):
            rule = of_scope
    return _for_model(rule, provider, model)


@functools.lru_cache(REMEMBERED)
def _for_model(rule: UsageRule, provider: str, model: str) -> UsageRule:
    names, named = field_names(), f"{model} {provider}".lower()
    rest = next((rest for part, rest in names.rests.items() if part in named), rule.rest)
    return replace(rule, rest=rest, may_be_net=any(part in named for part in names.net))


# --- fields that decide the price -----------------------------------------------------------------


@functools.cache
def _paths() -> tuple[tuple[str, ...], ...]:
    """Return the levels of all such fields."""
    rules = cost_rules().values()
    costs = [path for rule in rules for path in (rule.field, rule.own_key, rule.has_own_key)]
    paths = dict.fromkeys([*costs, COST_HEADER, SPEED, SEARCH_SIZE])
    return tuple(tuple(path.split(".")) for path in paths if path)


def billing_in(raw: object) -> dict[str, object]:
    """Return the fields of a usage as sent, by their path.

    Args:
        raw: A dictionary, an object of a client library, or the headers of a response.
    """
    if raw is None:
        return {}
    found: dict[str, object] = {}
    fields = raw if isinstance(raw, Mapping) else None
    for path in _paths():
        # Most usages have none of them.
        if fields is not None and path[0] not in fields:
            continue
        if (value := _at(raw, path)) is not None:
            found[".".join(path)] = value
    return found


def billing_in_span(attributes: Mapping[str, Any]) -> dict[str, object]:
    """Return the same from the attributes of a span.

    A cost there was computed by the instrumentation, unless otel-limits has copied that of the
    response.
    """
    found = {name: attributes[name] for name in (OWN_COST, OWN_COST_BY) if name in attributes}
    computed = next((attributes[name] for name in _computed() if name in attributes), None)
    if computed is not None:
        found[INSTRUMENTATION] = computed
    for name, value in attributes.items():
        if (within := within_usage(name)) in (SPEED, SEARCH_SIZE):
            found[within] = value
    return found


@functools.cache
def _computed() -> Iterable[str]:
    """Return the attributes of spans that have a cost."""
    return tuple(facts("usage/fields.yaml")["costs"])


def _at(raw: object, path: Iterable[str]) -> object:
    """Return what is at a path; `None` if it is not there, or has further levels."""
    for name in path:
        raw = raw.get(name) if isinstance(raw, Mapping) else getattr(raw, name, None)
    return raw if isinstance(raw, (bool, int, float, Decimal, str)) else None
