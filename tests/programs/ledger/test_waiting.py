"""A query of many waiting rows needs little memory."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from otel_limits.ledger.database import Database
from otel_limits.ledger.spill import SpillFiles
from tests.ledger.size import one

if TYPE_CHECKING:
    from tests.ledger.fixtures import LedgerFile


def test_many_waiting_rows_do_not_fill_the_memory(ledger: LedgerFile) -> None:
    """An outage of a day must not end the audit of a small machine."""
    with closing(Database(ledger.address)) as database:
        database.write(one(0))
    spill = SpillFiles(ledger.address)
    peaks = []
    for first in (1, 401):  # 8,800 rows, then 44,000
        for number in range(first, first + 400 * (1 if first == 1 else 4)):
            spill.append(one(number), to_disk=False)
        child = subprocess.Popen(
            [sys.executable, "-m", "otel_limits.cli", "audit", "spend"],
            stdout=subprocess.DEVNULL,
            env=os.environ | {"OTEL_LIMITS_LEDGER": str(ledger.path)},
        )
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0
        peaks.append(used.ru_maxrss)
    spill.seal()
    # Their dictionaries alone would take 60 MB more.
    assert peaks[1] - peaks[0] < 40_000
