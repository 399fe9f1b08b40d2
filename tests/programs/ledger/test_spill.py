"""Spill files of child processes are found and restored, and many rows need little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from otel_limits.cli import main
from otel_limits.ledger.database import Database
from otel_limits.ledger.spill import SpillFiles
from tests.ledger.size import one

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ledger.fixtures import LedgerFile


def test_a_test_has_directories_of_its_own(temporary: Path) -> None:
    """Data and temporary files, also of started programs, so foreign orphans are not met."""
    code = "import os, tempfile; print(tempfile.gettempdir(), os.environ['XDG_DATA_HOME'])"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.split() == [str(temporary), str(temporary / "data")]
    assert tempfile.gettempdir() == str(temporary)
    assert [*temporary.iterdir()] == []


# --- children of a process ------------------------------------------------------------------------

WORKER = """
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
from otel_limits import enable
from otel_limits.testing import ScriptedModel, says
from strands import Agent

def work(number):
    enable()
    Agent(model=ScriptedModel([says("x")]), callback_handler=None)("go")
    return number

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.stdin.readline().strip())
    kind = sys.stdin.readline().strip()
    if kind == "process":
        children = [context.Process(target=work, args=(n,)) for n in range(3)]
        for child in children:
            child.start()
        for child in children:
            child.join()
    elif kind == "pool":
        with context.Pool(2) as pool:
            pool.map(work, range(3), chunksize=1)
    else:
        with ProcessPoolExecutor(2, mp_context=context) as pool:
            list(pool.map(work, range(3)))
"""


@pytest.mark.parametrize("kind", ["process", "pool", "executor"])
@pytest.mark.parametrize("start", ["fork", "forkserver", "spawn"])
def test_children_lose_nothing_in_the_background(
    ledger: LedgerFile,
    program: Callable[..., subprocess.Popen[str]],
    capsys: pytest.CaptureFixture[str],
    start: str,
    kind: str,
) -> None:
    """Every normal end of every kind of child: such a process ends without `atexit`."""
    child = program(WORKER, OTEL_LIMITS_LEDGER_SYNC="background")
    _, said = child.communicate(f"{start}\n{kind}\n", timeout=120)
    assert child.returncode == 0, said
    capsys.readouterr()
    assert main(["audit", "stops", "--ledger", str(ledger.path), "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["stops"]
    assert (row["reason"], row["invocations"], row["tokens"]) == ("end_turn", 3, 45)


# --- memory ---------------------------------------------------------------------------------------


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
