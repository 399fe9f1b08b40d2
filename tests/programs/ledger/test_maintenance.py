"""The commands of the page on ledgers recover a damaged file with SQLite's own shell."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from importlib import resources
from typing import TYPE_CHECKING, Final

import pytest

from otel_limits.cli import main
from otel_limits.ledger.spill import SpillFiles
from tests.ledger.book import Call, Entry, write
from tests.ledger.size import one
from tests.unit.audit.test_verify import overwrite, pages_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ledger.fixtures import LedgerFile

SHELL: Final = shutil.which("sqlite3")

pytestmark = pytest.mark.skipif(SHELL is None, reason="SQLite's shell is not installed.")


def can_recover() -> bool:
    """Whether the shell has what `.recover` needs, which the ones of Debian and Ubuntu lack."""
    options = ("sqlite3", ":memory:", "PRAGMA compile_options")
    done = subprocess.run(options, check=True, capture_output=True, text=True)
    return "ENABLE_DBPAGE_VTAB" in done.stdout


def shown(command: str) -> str:
    """The line of the page that has a command of the shell."""
    page = (resources.files("otel_limits.docs") / "ledger.md").read_text(encoding="utf-8")
    (line,) = re.findall(rf"^sqlite3 .* {re.escape(command)} .*$", page, re.MULTILINE)
    return f"umask 077; {line}"


def damage(ledger: LedgerFile) -> None:
    """Record calls of 100 invocations, overwrite a page of them, and leave a row in a file."""
    entries = [Entry(agent=f"a {n}", calls=[Call()] * 3, at=time.time() - 60) for n in range(100)]
    write(ledger.address, *entries)
    pages = pages_of(ledger.path, "otel_limits_model_calls")
    overwrite(ledger.path, [pages[len(pages) // 2]], b"\xff" * 4096)
    spill = SpillFiles(ledger.address)
    spill.append(one(1), to_disk=False)
    spill.seal()


@pytest.mark.parametrize("command", [".recover", ".dump"])
def test_readable_rows_reach_a_new_ledger(
    ledger: LedgerFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    """With those of spill files; an audit names what is missing."""
    if command == ".recover" and not can_recover():
        pytest.skip("This shell of SQLite has no .recover.")
    damage(ledger)
    assert main(["audit", "verify"]) == 1
    (tmp_path / "damaged").mkdir()
    ledger.path.rename(tmp_path / "damaged" / "ledger.db")
    monkeypatch.chdir(tmp_path)
    subprocess.run(["bash", "-c", shown(command)], check=True, capture_output=True)
    recovered = tmp_path / "damaged" / "recovered.db"
    assert recovered.stat().st_mode & 0o077 == 0
    assert main(["ledger", "merge", str(recovered), "--into", str(ledger.path)]) == 0
    capsys.readouterr()
    found = {row["agent"] for row in ledger.calls()}
    assert 100 > len(found) > 80
    assert len(ledger.invocations()) == 101
    assert not ledger.spills()
    assert main(["audit", "verify"]) == 1
    assert "Invocation totals match the sums of their calls" in capsys.readouterr().out
