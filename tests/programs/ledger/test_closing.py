"""The digest of a close, as a shell computes it."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from otel_limits.core.events import QuotaGrant
from tests.ledger.book import DAY, NINE, write
from tests.unit.audit.test_completeness import record
from tests.unit.ledger.test_closing import close, entry

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ledger.fixtures import LedgerFile


@pytest.fixture
def closed(ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A close of October 2025, in which two invocations ended on each of three days."""
    write(ledger.address, *(entry(f"agent-{n % 2}", n // 2) for n in range(6)))
    record(
        ledger,
        QuotaGrant(
            quota="team", key="acme", change="grant", amount=5, unit="usd", until=None,
            by="ops@host", at=NINE + DAY, id="grant-1",
        ),
    )  # fmt: skip
    path = tmp_path / "october.json"
    close(capsys, path, "--month", "2025-10")
    return path


def test_digest_of_a_close_is_that_of_its_other_lines(closed: Path) -> None:
    """As the page says, with the usual commands."""
    command = f"grep -v '^ \"digest\"' {closed} | sha256sum"
    told = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert told.stdout.split()[0] == json.loads(closed.read_text("utf-8"))["digest"]
