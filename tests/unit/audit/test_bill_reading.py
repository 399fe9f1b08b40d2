"""Exports of vendors, each in its own form, become the same rows."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.audit.bills.bill import BilledTokens
from otel_limits.audit.bills.bill_reading import read_bills
from otel_limits.core.errors import LedgerError
from tests.ledger.bills import ACTIVITY, GENERATIONS, LOGS, anthropic, openai, paid, used

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

CACHED = {
    "uncached_input_tokens": 10,
    "cache_read_input_tokens": 30,
    "cache_creation": {"ephemeral_1h_input_tokens": 4, "ephemeral_5m_input_tokens": 5},
    "output_tokens": 7,
    "model": "claude-opus-4-1",
}
CHARGED = {
    "amount": "123.45",
    "currency": "USD",
    "model": "claude-opus-4-1",
    "token_type": "output_tokens",
}

# The text of a file, and its row: models, tokens, requests, cost, kind.
FORMS: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "OpenAI's usage": (
        openai(used(model="m-2026-01-01", input_cached_tokens=6, input_cache_write_tokens=1)),
        (("m-2026-01-01",), BilledTokens(3, 6, 1, 2), 1, None, None),
    ),
    "OpenAI's costs": (
        openai(paid("0.06", line_item="m-2026-01-01, cached input", project_id="p")),
        (("m-2026-01-01",), None, None, "0.06", "cache_read"),
    ),
    "OpenAI's costs, without an amount": (
        openai(
            {"object": "organization.costs.result", "amount": {"value": None, "currency": None}}
        ),
        ((), None, None, "0", None),
    ),
    "Anthropic's usage": (
        anthropic(CACHED),
        (("claude-opus-4-1",), BilledTokens(10, 30, 9, 7), None, None, None),
    ),
    "Anthropic's costs, in cents": (
        anthropic(CHARGED),
        (("claude-opus-4-1",), None, None, "1.2345", "output"),
    ),
    "OpenRouter's generations": (
        GENERATIONS + "gen-1,2026-11-03 10:00:00.5,0.001,0.02,10,5,0,4,a/m-20260101,A,free,k\n",
        (("a/m-20260101:free",), BilledTokens(6, 4, None, 5), 1, "0.021", None),
    ),
    "OpenRouter's activity": (
        ACTIVITY + "2026-11-03,a/m,a/m-20260101,e,A,0.015,0.012,5,50,125,25\n",
        (("a/m", "a/m-20260101"), BilledTokens(50, None, None, 125), 5, "0.027", None),
    ),
    "LiteLLM's logs as CSV": (
        LOGS + "r,acompletion,h,1.5e-05,9,7,2,2026-11-03 23:59:59+00,,m-1,m,x,,"
        '"{""usage_object"": {""prompt_tokens_details"": {""cached_tokens"": 4}}}",\n'
        "hit,acompletion,h,0,9,7,2,2026-11-03 12:00:00,,m-1,m,x,True,{},success\n"
        "failed,acompletion,h,0,0,0,0,2026-11-03 12:00:00,,m-1,m,x,,{},failure\n",
        (("m", "m-1"), BilledTokens(3, 4, 0, 2), 1, "0.000015", None),
    ),
    "LiteLLM's logs as JSON lines, in another zone": (
        '{"request_id": "r", "startTime": "2026-11-02T23:30:00.123-05:00", "spend": 0.1, '
        '"prompt_tokens": 7, "completion_tokens": 2, "model": "m", "model_group": ""}\n' * 2,
        (("m", "m"), BilledTokens(7, None, None, 2), 1, "0.1", None),
    ),
}


def written(folder: Path, *texts: str) -> Sequence[Path]:
    """Files with these texts."""
    files = [folder / f"export-{number}" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text, encoding="utf-8")
    return files


def test_an_export_becomes_exact_rows(tmp_path: Path) -> None:
    """A file that is given twice counts once, and no amount has been a float."""
    for form, (text, expected) in FORMS.items():
        files = written(tmp_path, text, text)
        (bill,) = read_bills(files)
        (row,) = bill.rows
        models, tokens, requests, cost, kind = expected
        exact = None if cost is None else Decimal(cost)
        found = (row.models, row.tokens, row.requests, row.cost, row.kind)
        assert (form, *found) == (form, models, tokens, requests, exact, kind)
        assert (form, row.day) == (form, date(2026, 11, 3))


MORE: Mapping[str, Any] = {"has_more": True, "next_page": "abc"}
REJECTED: Sequence[tuple[Sequence[str], str]] = [
    ([openai(used(), **MORE)], "has more pages (has_more is true). Request the next one with page"),
    ([openai(used(), **MORE), openai(used(), day=2)], "has more pages"),
    ([anthropic(CACHED, **MORE)], "with page=abc, and pass all files"),
    (
        ['{"data": [], "page": 2, "total_pages": 2}'],
        "Page 1 of 2 of LiteLLM's logs is missing. Request it with page=1",
    ),
    ([anthropic({**CHARGED, "currency": "EUR"})], "has amounts in EUR, and the ledger has USD"),
    ([openai(used(model="m")), openai(used(model="m", input_tokens=9))], "Pass only the newer"),
    ([openai(used(model="m")), openai(used(project_id="p"))], "twice, by 1 day, 0:00:00, model"),
    (['{"invoice": 1}'], "is not a known bill: it has invoice. Known bills: OpenAI's"),
    (["a,b\n1\n"], "is neither JSON nor CSV: line 2 has not 2 fields"),
    (["[1]"], "it has values that are not objects"),
    (["{"], "is neither JSON nor CSV"),
    (["[" * 100_000], "is neither JSON nor CSV"),
    (["[]"], "is empty"),
    (["\ufeff\r\n"], "is empty"),
    ([openai(used(input_tokens=-1))], "input_tokens must be a whole number of 0 or more, got '-1'"),
    ([anthropic({**CHARGED, "amount": "many"})], "amount must be an amount, e.g. 0.06, got 'many'"),
    ([anthropic({**CHARGED, "amount": "1e999999"})], "amount must be an amount"),
    ([anthropic({"requests": 1})], "uncached_input_tokens must be in each result"),
]


def test_a_file_that_is_no_whole_bill_is_rejected_with_the_fix(tmp_path: Path) -> None:
    """Every number of a partial bill would be a difference without a cause."""
    for texts, sentence in REJECTED:
        with pytest.raises(LedgerError) as raised:
            read_bills(written(tmp_path, *texts))
        assert sentence in str(raised.value)
    with pytest.raises(LedgerError, match="cannot be read: No such file"):
        read_bills([tmp_path / "missing"])


def test_pages_that_follow_each_other_are_one_bill(tmp_path: Path) -> None:
    """Pages come in any order, and days without use are covered, too."""
    pages = (
        openai(used(model="m"), **MORE),
        openai(day=2),
        openai(used(model="m"), day=1, **MORE),
    )
    (bill,) = read_bills(written(tmp_path, *pages))
    assert [row.day.day for row in bill.rows] == [3, 4]
    assert sorted(day.day for day in bill.used_days) == [3, 4, 5]
    assert not bill.gaps
