"""The question `spend`: model calls, tokens and money, by any property of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import tzinfo
from typing import Any, Final

from otel_limits.audit import asking
from otel_limits.audit.answers import Answer, Column, Kind, Table
from otel_limits.audit.charts import overview
from otel_limits.audit.question import Inquiry, Option, Question
from otel_limits.audit.sums import DATES, Groups, Rows, Sums, fold

PRESENT, FORMER = asking.PRICES

KEY_KINDS: Final[Mapping[str, Kind]] = {
    **dict.fromkeys(("trace", "invocation", "root"), "id"),
    **dict.fromkeys(DATES, "date"),
}

FIGURES: Final = (
    Column("calls", "Calls", "count"),
    Column("input_tokens", "Input", "count"),
    Column("output_tokens", "Output", "count"),
    Column("tokens", "Tokens", "count", is_key=True),
    Column("cached_share", "Cached", "share"),
    Column("cost_usd", "Cost", "money", is_key=True),
    Column("unpriced_tokens", "Unpriced tokens", "count"),
    Column("unmeasured_calls", "Unmeasured calls", "count"),
)


def spend(inquiry: Inquiry, by: Sequence[str], prices: str, top: int | None) -> Answer:
    """Answer what was spent."""
    from otel_limits.ledger import spending

    inquiry.require_known(by)
    former = prices == FORMER
    sums = spending.spend(inquiry.connection, by, inquiry.selection, former=former)
    rows = list(inquiry.work.through(sums))
    total = fold(rows, ()).get((), Sums())
    return Answer(
        question="spend",
        title="Token spend at former prices" if former else "Token spend",
        about=inquiry.about,
        tables=[spend_table(rows, by, total, inquiry.selection.zone, top)],
        charts=[] if former else overview(inquiry),
        totals=[
            ("Model calls", "count", total.calls),
            ("Tokens", "count", total.tokens),
            ("Cached input", "share", total.cached_share),
            ("Cost", "money", total.cost),
            ("Unpriced tokens", "count", total.unpriced_tokens),
            ("Unmeasured calls", "count", total.unmeasured_calls),
        ],
    )


def spend_table(
    rows: Rows, by: Sequence[str], total: Sums, zone: tzinfo, top: int | None = None
) -> Table:
    """One row per group, dates in their order, the most expensive first among the others.

    With `top` it has that many groups, the most expensive, and one row with all others.
    """
    groups = fold(rows, by, zone)
    others: list[tuple[Any, ...]] = []
    if top is not None and top < len(groups) and by:
        groups, rest = _split(groups, top)
        others = [(f"({rest[0]:,} others)", *("" for _ in by[1:]), *_figures(rest[1]))]
    in_order = sorted(groups.items(), key=lambda item: _rank(item[0], item[1], by))
    total_keys = ("total", *("" for _ in by[1:])) if by else ()
    return Table(
        name="spend",
        title="Spend by " + ", ".join(by) if by else "Spend",
        columns=(*map(_key_column, by), *FIGURES),
        rows=[*((*key, *_figures(sums)) for key, sums in in_order), *others],
        total=(*total_keys, *_figures(total)),
        note="Input includes cached tokens. Cost is that of the calls with a known price; tokens "
        "of the others are unpriced. Calls whose provider reported no usage are unmeasured, and "
        "count with their estimate.",
    )


def _split(groups: Groups, top: int) -> tuple[Groups, tuple[int, Sums]]:
    """Keep the most expensive groups, and add the others up."""
    ranked = sorted(groups.items(), key=lambda item: _rank(item[0], item[1], ()))
    rest = Sums()
    for _, sums in ranked[top:]:
        rest.merge(sums)
    return dict(ranked[:top]), (len(ranked) - top, rest)


def _key_column(name: str) -> Column:
    return Column(name, name, KEY_KINDS.get(name, "text"), is_key=True)


def _figures(sums: Sums) -> tuple[Any, ...]:
    """The values of `FIGURES`."""
    return (
        sums.calls,
        sums.input,
        sums.output,
        sums.tokens,
        sums.cached_share,
        sums.cost,
        sums.unpriced_tokens,
        sums.unmeasured_calls,
    )


def _rank(key: tuple[Any, ...], sums: Sums, by: Sequence[str]) -> tuple[Any, ...]:
    dates = tuple(str(value) for name, value in zip(by, key, strict=False) if name in DATES)
    return (dates, -sums.pico, -sums.tokens, tuple(str(value) for value in key))


SPEND: Final = Question(
    name="spend",
    help="Calls, tokens and money, by any property.",
    answer=spend,
    tables={"spend": FIGURES},
    options=(
        Option(
            "--by",
            "NAMES",
            asking.properties,
            "agent, model, provider, state, side, session, reason, hour, day, week, month, or "
            "any audit key, separated by commas (default: agent,model)",
            default=("agent", "model"),
        ),
        Option(
            "--top",
            "N",
            asking.cap,
            "only the N groups that cost most, and a row with all others (default: every group)",
        ),
        Option(
            "--prices",
            "WHICH",
            asking.prices,
            "present, or former for those with which calls were recorded, before `otel-limits "
            "ledger reprice` (default: present)",
            default=PRESENT,
        ),
    ),
)
