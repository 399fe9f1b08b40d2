"""The question `unmeasured`: the selected calls without measured usage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ledger.book import Call, Entry, write
from tests.unit.audit.test_completeness import ask

if TYPE_CHECKING:
    from tests.ledger.fixtures import LedgerFile

MIXED = Entry(
    calls=[
        Call(model="a", kind="estimated", estimated=True),
        Call(model="b", kind="failed", estimated=True),
    ]
)
"""It starts at 2025-10-09 09:00:00 UTC, with a call after one second and another after two."""


@pytest.mark.parametrize(
    ("options", "models"),
    [
        ([], {"a", "b"}),
        (["--where", "model=a"], {"a"}),
        (["--where", "model!=a"], {"b"}),
        (["--where", "state=interrupted"], {"b"}),
        (["--since", "2025-10-09T09:00:02Z"], {"b"}),
        (["--until", "2025-10-09T09:00:02Z"], {"a"}),
        (["--where", "reason=end_turn"], {"a", "b"}),
    ],
    ids=["all", "model", "not model", "state", "since", "until", "reason"],
)
def test_selection_applies_to_calls(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str], options: list[str], models: set[str]
) -> None:
    """An invocation has calls of several models, and may be older than its last call."""
    write(ledger.address, MIXED)
    status, answer = ask(capsys, "unmeasured", *options)
    assert (status, {row["model"] for row in answer["unmeasured"]}) == (0, models)
