"""The question `spend`: model calls, tokens and money, by any property of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from otel_limits.audit import asking
from otel_limits.audit.answers import Answer, Column, Kind, Table
from otel_limits.audit.charts import overview
from otel_limits.audit.question import Inquiry, Option, Question
from otel_limits.audit.sums import DATES, Rows, Sums, fold

KEY_KINDS: Final[Mapping[str, Kind]] = {"trace": "id", "invocation": "id", "root": "id"}

FIGURES: Final = (
    Column("calls", "Calls", "count"),
    Column("input_tokens", "Input", "count"),
    Column("output_tokens", "Output", "count"),
    Column("tokens", "Tokens", "count"),
    Column("cached_share", "Cached", "share"),
    Column("cost_usd", "Cost", "money"),
    Column("unpriced_tokens", "Unpriced tokens", "count"),
    Column("unmeasured_calls", "Unmeasured calls", "count"),
)


def spend(inquiry: Inquiry, by: Sequence[str]) -> Answer:
    """Answer what was spent."""
    from otel_limits.ledger import spending

    inquiry.require_known(by)
    rows = list(inquiry.work.through(spending.spend(inquiry.connection, by, inquiry.selection)))
    total = fold(rows, ()).get((), Sums())
    return Answer(
        question="spend",
        title="Token spend",
        about=inquiry.about,
        tables=[spend_table(rows, by, total)],
        charts=overview(inquiry),
        totals=[
            ("Model calls", "count", total.calls),
            ("Tokens", "count", total.tokens),
            ("Cached input", "share", total.cached_share),
            ("Cost", "money", total.cost),
            ("Unpriced tokens", "count", total.unpriced_tokens),
            ("Unmeasured calls", "count", total.unmeasured_calls),
        ],
    )


def spend_table(rows: Rows, by: Sequence[str], total: Sums) -> Table:
    """One row per group, dates in their order, the most expensive first among the others."""
    in_order = sorted(fold(rows, by).items(), key=lambda item: _rank(item[0], item[1], by))
    total_keys = ("total", *("" for _ in by[1:])) if by else ()
    return Table(
        name="spend",
        title="Spend by " + ", ".join(by) if by else "Spend",
        columns=(*(Column(name, name, KEY_KINDS.get(name, "text")) for name in by), *FIGURES),
        rows=[(*key, *_figures(sums)) for key, sums in in_order],
        total=(*total_keys, *_figures(total)),
        note="Input includes cached tokens. Cost is that of the calls with a known price; tokens "
        "of the others are unpriced. Calls whose provider reported no usage are unmeasured, and "
        "count with their estimate.",
    )


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
    dates = tuple(str(value) for name, value in zip(by, key, strict=True) if name in DATES)
    return (dates, -sums.pico, -sums.tokens, tuple(str(value) for value in key))


SPEND: Final = Question(
    name="spend",
    help="Calls, tokens and money, by any property.",
    answer=spend,
    options=(
        Option(
            "--by",
            "NAMES",
            asking.properties,
            "agent, model, provider, state, session, reason, hour, day, week, month, or any "
            "audit key, separated by commas (default: agent,model)",
            default=("agent", "model"),
        ),
    ),
)
