"""The question `stops`: how the selected invocations ended, each with all of its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ledger.book import Call, Entry, write
from tests.unit.audit.test_completeness import ask

if TYPE_CHECKING:
    from tests.ledger.fixtures import LedgerFile

MIXED = Entry(
    calls=[
        Call(model="a", kind="estimated", estimated=True, tools=["search?"]),
        Call(model="b", kind="estimated", estimated=True, tools=["fetch?"]),
    ]
)
"""It starts at 2025-10-09 09:00:00 UTC, with a call after one second and another after two."""


@pytest.mark.parametrize(
    "options",
    [["--where", "model=a"], ["--until", "2025-10-09T09:00:02Z"]],
    ids=["model", "until"],
)
def test_selected_invocation_has_all_of_its_calls(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """Estimated calls and refusals belong to the tokens and the halt of the same answer."""
    write(ledger.address, MIXED)
    status, answer = ask(capsys, "stops", *options)
    assert (status, [(row["tokens"], row["estimated_calls"]) for row in answer["stops"]]) == (
        0,
        [(240, 2)],
    )
    assert {row["tool"] for row in answer["refused_tool_calls"]} == {"search", "fetch"}
