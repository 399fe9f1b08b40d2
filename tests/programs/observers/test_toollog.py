"""The tool log of forked processes, and on a full disk."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from otel_limits.observers.toollog import ToolLog, read
from tests.unit.observers.test_toollog import write


def fork_and_write(log: ToolLog, path: Path) -> None:
    """In a forked process: write one entry, and leave its path."""
    write(log, 2)
    path.write_text(str(log.path))


def numbers_in(path: Path) -> list[int]:
    """The numbers of the calls in one file."""
    return [json.loads(line)["number"] for line in path.read_text().splitlines()]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_a_file_of_its_own(tmp_path: Path) -> None:
    """Parent and child go on side by side, even when a thread was writing at the fork."""
    log = ToolLog(tmp_path)
    write(log, 1)
    stop = threading.Event()

    def keep_writing() -> None:
        while not stop.is_set():
            write(log, 4)

    busy = threading.Thread(target=keep_writing)
    busy.start()
    child = multiprocessing.get_context("fork").Process(
        target=fork_and_write, args=(log, tmp_path / "path")
    )
    child.start()
    child.join()
    stop.set()
    busy.join()
    write(log, 3)
    written = (tmp_path / "path").read_text()
    assert child.exitcode == 0
    assert written != str(log.path)
    assert numbers_in(Path(written)) == [2]
    numbers = numbers_in(log.path)
    assert (numbers[0], numbers[-1], set(numbers[1:-1]) <= {4}) == (1, 3, True)


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from otel_limits.core.events import Invocation
from otel_limits.observers.toollog import ToolLog

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

log = ToolLog(Path(sys.argv[1]))
def write(number):
    log.write(Invocation(agent="a", id="i", root_id="i"), number, "t", {}, "x" * 300, trigger=False)

write(1)
limit(log.path.stat().st_size + 100)
write(2)
write(3)
assert log.failed == 2, log.failed
limit(resource.RLIM_INFINITY)
write(4)
assert log.failed == 2, log.failed
"""


def test_the_log_goes_on_after_a_full_disk(tmp_path: Path) -> None:
    """Entries that did not fit are lost, including partial ones; later ones are not."""
    subprocess.run([sys.executable, "-c", FULL_DISK, tmp_path], check=True)
    entries = read(tmp_path)
    assert [entry.number for entry in entries] == [1, 4]
    assert entries.skipped == 1
