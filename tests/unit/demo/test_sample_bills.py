"""The bills of the sample fleet agree with its ledger, apart from what a bill may differ in."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import TYPE_CHECKING

from otel_limits.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

BILLS = (
    "openai-usage.json", "openai-costs.json", "anthropic-usage.json", "anthropic-costs.json",
    "litellm.csv",
)  # fmt: skip


def test_differences_are_those_of_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Newcomers follow the page about bills with the example, on any day."""
    assert main(["demo", "--record", str(tmp_path)]) == 0
    assert f"bills of its last week: {', '.join(BILLS)}." in capsys.readouterr().out
    words = ["audit", "reconcile", "--ledger", str(tmp_path / "ledger.db"), "--format", "json"]
    assert main([*words, "--bill", *(str(tmp_path / name) for name in BILLS)]) == 1
    answer = json.loads(capsys.readouterr().out)
    found = {
        (part["vendor"], part["model"], part["cause"])
        for part in answer["bill_parts"]
        if abs(Decimal(part["cost"])) > Decimal("0.1")
    }
    assert found == {
        ("OpenAI", "web search tool calls", "unexplained"),
        ("Anthropic", "claude-sonnet-4-5", "only on the bill"),
    }
    assert len({row["day"] for row in answer["bill_cost"]}) == 7
    assert len(answer["bill_owners"]) == 1


def test_bills_of_a_user_are_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They may be real ones, or of an older sample: the ledger differs from both."""
    for name in BILLS[1:3]:
        (tmp_path / name).write_text("{}")
    assert main(["demo", "--record", str(tmp_path)]) == 0
    assert [(tmp_path / name).read_text() for name in BILLS[1:3]] == ["{}", "{}"]
    out = capsys.readouterr().out
    assert f"bills of its last week: {BILLS[0]}, {', '.join(BILLS[3:])}.\n" in out
    assert f"Not replaced, as they already exist: {', '.join(BILLS[1:3])}.\n\nexport" in out
