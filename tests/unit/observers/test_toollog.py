"""The tool log keeps what was asked and answered, whatever the disk and the processes do."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from otel_limits.core.events import InternalError, Invocation
from otel_limits.observers.toollog import LoggedCall, ToolLog, read
from otel_limits.runs.registry import LIVE

if TYPE_CHECKING:
    from collections.abc import Callable

INVOCATION = Invocation(agent="tester", id="i" * 32, root_id="i" * 32, trace_id="t" * 32)


def write(log: ToolLog, number: int = 1, *, trigger: bool = False, **values: Any) -> None:
    """Write one call of `search`."""
    defaults = {"tool": "search", "arguments": {"query": "x"}, "result_text": "found"}
    log.write(INVOCATION, number, **{**defaults, **values}, trigger=trigger)


def only(directory: Path) -> LoggedCall:
    """The one entry that there is."""
    (entry,) = read(directory)
    return entry


# --- what is kept -----------------------------------------------------------------------------


def test_an_entry_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Contents, and whose call it was."""
    before = datetime.fromtimestamp(time.time(), timezone.utc)
    write(ToolLog(tmp_path), 3, arguments={"query": "ü"}, result_text="two\nlines")
    entry = only(tmp_path)
    assert before <= entry.time <= datetime.fromtimestamp(time.time(), timezone.utc)
    assert entry == LoggedCall(
        time=entry.time,
        agent="tester",
        invocation_id="i" * 32,
        trace_id="t" * 32,
        number=3,
        tool="search",
        arguments='{"query": "ü"}',
        result="two\nlines",
        trigger=False,
    )


@given(result=st.text(), arguments=st.text())
@example(result="half \ud800", arguments="other half \udc00")
def test_any_text_survives(
    tmp_path_factory: pytest.TempPathFactory, result: str, arguments: str
) -> None:
    """Line ends, quotes and half characters come back as they were."""
    directory = tmp_path_factory.mktemp("log")
    write(ToolLog(directory), arguments=[arguments], result_text=result)
    entry = only(directory)
    assert entry.result == result
    assert json.loads(entry.arguments) == [arguments]


def test_contents_are_cut_at_2000_characters(tmp_path: Path) -> None:
    """The beginning of a long result and of long arguments is kept."""
    write(ToolLog(tmp_path), arguments="a" * 3_000, result_text="ü" * 3_000)
    entry = only(tmp_path)
    assert entry.result == "ü" * 2_000
    assert entry.arguments == '"' + "a" * 1_999


def test_non_json_arguments_are_still_written(tmp_path: Path) -> None:
    """Objects, keys and circles that JSON does not have are written as Python shows them."""
    circle: list[Any] = []
    circle.append(circle)
    log = ToolLog(tmp_path)
    for arguments in ({"when": timedelta(1)}, {(1, 2): 3}, circle):
        write(log, arguments=arguments)
    texts = [entry.arguments for entry in read(tmp_path)]
    assert texts == ['{"when": "1 day, 0:00:00"}', "{(1, 2): 3}", "[[...]]"]


def test_every_nth_call_is_written_and_each_that_caused_a_halt(tmp_path: Path) -> None:
    """Of every three calls the third, and the triggering one whatever its number."""
    log = ToolLog(tmp_path, interval=3)
    for number in range(1, 9):
        write(log, number, trigger=number == 8)
    entries = [(entry.number, entry.trigger) for entry in read(tmp_path)]
    assert entries == [(3, False), (6, False), (8, True)]


def test_an_interval_below_one_is_refused(tmp_path: Path) -> None:
    """The sentence names the bound and the value."""
    with pytest.raises(ValueError, match="interval must be a whole number of 1 or more, got 0"):
        ToolLog(tmp_path, interval=0)


# --- files ------------------------------------------------------------------------------------


def test_contents_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    """The file, and the directory where it had to be made."""
    log = ToolLog(tmp_path / "new" / "log")
    write(log)
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(log.path.parent.stat().st_mode) == 0o700


def test_every_new_directory_is_private_whatever_the_umask(tmp_path: Path) -> None:
    """Others could replace a directory in one that they can write."""
    before = os.umask(0)
    try:
        write(ToolLog(tmp_path / "new" / "inner" / "log"))
    finally:
        os.umask(before)
    made = [tmp_path / each for each in ("new", "new/inner", "new/inner/log")]
    assert [stat.S_IMODE(each.stat().st_mode) for each in made] == [0o700] * 3


def test_nothing_is_made_before_the_first_entry(tmp_path: Path) -> None:
    """A log that is never written to leaves no trace."""
    log = ToolLog(tmp_path / "log", interval=2)
    write(log, 1)
    assert not log.path.parent.exists()


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    """Entries cannot be redirected to another file."""
    log, target = ToolLog(tmp_path), tmp_path / "target"
    log.path.symlink_to(target)
    write(log)
    assert log.failed == 1
    assert not target.exists()


def test_threads_do_not_tear_each_other_s_lines(tmp_path: Path) -> None:
    """Each entry is one piece, however many threads write."""
    log = ToolLog(tmp_path)

    def write_some() -> None:
        for number in range(50):
            write(log, number, result_text="ü" * 2_000)

    threads = [threading.Thread(target=write_some) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = read(tmp_path)
    assert (len(list(entries)), entries.skipped) == (400, 0)


# --- failures ---------------------------------------------------------------------------------


@pytest.fixture
def no_directory(tmp_path: Path) -> Path:
    """A path where no directory can be made: a file is there."""
    path = tmp_path / "file"
    path.touch()
    return path


def test_a_write_error_is_one_warning_per_minute_and_counted(
    no_directory: Path, warnings_logged: Callable[[], list[str]]
) -> None:
    """Three failures within the minute are one warning; the next minute has its own."""
    now = 1_000.0
    log = ToolLog(no_directory, clock=lambda: now)
    for _ in range(3):
        write(log)
    assert (log.failed, len(warnings_logged())) == (3, 1)
    now += 60
    write(log)
    assert warnings_logged()[1] == (
        f"otel-limits: cannot write the tool log to {no_directory}: Not a directory. The agent "
        "continues; 4 entries lost."
    )


def test_write_error_is_published(
    no_directory: Path, events: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it is counted among the internal errors."""
    LIVE.observers.set_observers((events.append,))
    write(ToolLog(no_directory))
    assert events == [InternalError(component="tool_log")]


@pytest.mark.usefixtures("faulty")
def test_arguments_that_cannot_even_be_printed_are_not_felt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Foreign code that fails costs its entry, and says so."""

    class Broken:
        def __str__(self) -> str:
            raise OSError

    write(ToolLog(tmp_path), arguments=Broken())
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert list(read(tmp_path)) == []


# --- reading ----------------------------------------------------------------------------------


def test_malformed_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    """Half a line, another JSON value, a wrong type, bytes: none hides the entries around it."""
    log = ToolLog(tmp_path)
    write(log, 1)
    good = json.loads(log.path.read_text())
    bad = [
        b'{"time": "2026',
        b"[]",
        b"1",
        json.dumps({**good, "number": "1"}).encode(),
        json.dumps({**good, "time": "noon"}).encode(),
        json.dumps({**good, "time": 5}).encode(),
        json.dumps({name: good[name] for name in good if name != "tool"}).encode(),
        b"\xff\x00",
        b"[" * 100_000,
    ]
    with log.path.open("ab") as file:
        file.writelines(line + b"\n" for line in bad)
        file.write(b"\n")
    write(log, 2)
    entries = read(tmp_path)
    assert [entry.number for entry in entries] == [1, 2]
    assert entries.skipped == len(bad)


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    """An entry with more than is known is still an entry."""
    log = ToolLog(tmp_path)
    write(log)
    line = {**json.loads(log.path.read_text()), "more": 1}
    log.path.write_text(json.dumps(line) + "\n")
    assert only(tmp_path).tool == "search"


def test_endless_line_is_read_in_parts(tmp_path: Path) -> None:
    """A file full of zeros is a few malformed lines."""
    log = ToolLog(tmp_path)
    write(log)
    os.truncate(log.path, log.path.stat().st_size + 3_000_000)
    entries = read(tmp_path)
    assert len(list(entries)) == 1
    assert entries.skipped == 3


def test_every_process_is_read(tmp_path: Path) -> None:
    """All files of the directory, other files aside."""
    for number in (1, 2):
        write(ToolLog(tmp_path), number)
    (tmp_path / "notes.txt").write_text("mine")
    entries = read(tmp_path)
    assert sorted(entry.number for entry in entries) == [1, 2]
    assert entries.skipped == 0
