"""An upgrade whose process is killed changes nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.ledger.upgrades import CURRENT
from tests.ledger.book import write
from tests.unit.ledger.test_upgrade import (
    ENTRIES,
    SPEND,
    answer,
    open_as_later_version,
    schema,
    version,
)

if TYPE_CHECKING:
    from tests.ledger.fixtures import LedgerFile


@pytest.fixture
def truth(ledger: LedgerFile, capsys: pytest.CaptureFixture[str]) -> Any:
    """The answer of `audit spend` for the entries in a ledger of this version."""
    write(ledger.address, *ENTRIES)
    return answer(capsys, *SPEND)


DIES = """
import os, signal, sys
from pathlib import Path
from otel_limits.ledger.address import parse
from otel_limits.ledger.database import Database
from tests.unit.ledger.test_upgrade import add_note

def die(connection):
    add_note(connection)
    os.kill(os.getpid(), signal.SIGKILL)

Database(parse("test", sys.argv[1], Path("/nowhere")), [die]).engine()
"""


def test_killed_upgrade_changes_nothing(ledger: LedgerFile, truth: Any) -> None:
    """After SIGKILL between its statements the ledger is unchanged, and the next one upgrades."""
    before = schema(ledger)
    killed = subprocess.run([sys.executable, "-c", DIES, str(ledger.path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (schema(ledger), version(ledger)) == (before, CURRENT)
    open_as_later_version(ledger.address)
    assert version(ledger) == CURRENT + 1
