"""Audit commands as programs: what they import, and their progress bar."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.ledger.fixtures import LedgerFile


def test_a_question_needs_neither_strands_nor_opentelemetry(week: LedgerFile) -> None:
    """An audit starts fast: it imports nothing that only a running agent needs."""
    text = (
        "import sys; from otel_limits.cli import main; main(['audit', 'spend']);"
        "sys.exit(bool({'strands', 'opentelemetry', 'wrapt'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", text], check=True, capture_output=True)


# --- a bar while it takes long --------------------------------------------------------------------

TAKES_ITS_TIME = """
import dataclasses, sys
from otel_limits.audit import questions

spend, *others = questions.QUESTIONS

def ask_slowly(*arguments, **options):
    wait()
    return spend.answer(*arguments, **options)

questions.QUESTIONS = (dataclasses.replace(spend, answer=ask_slowly), *others)

from otel_limits.cli import main
sys.exit(main(["audit", "spend", *sys.argv[1:]]))
"""

UNTIL_TOLD = "def wait(): sys.stdin.readline()\n"

UNTIL_THE_BAR_IS_DUE = """
import threading
def wait():
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
"""


def slow_question(wait: str, *arguments: str) -> list[str]:
    """Make the command of a query that continues when `wait` does."""
    return [sys.executable, "-c", wait + TAKES_ITS_TIME, *arguments]


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_question_that_takes_long_shows_a_bar(week: LedgerFile, form: str) -> None:
    """On a terminal a bar is drawn while the question is still open, and the answer has none."""
    main_end, terminal = pty.openpty()
    process = subprocess.Popen(
        slow_question("import sys\n" + UNTIL_TOLD, "--format", form),
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
    )
    os.close(terminal)
    shown = b""
    while b"Querying the ledger" not in shown:
        assert select.select([main_end], [], [], 60)[0], shown
        shown += os.read(main_end, 65_536)
    answer, _ = process.communicate("now it may end\n")
    os.close(main_end)
    assert process.returncode == 0
    assert "research" in answer
    assert [each for each in ("Asking", "\x1b", "\r") if each in answer] == []
    if form == "json":
        assert json.loads(answer)["totals"]["spend"]["tokens"] == 4142


@pytest.mark.parametrize("form", ["table", "json"])
def test_no_bar_where_there_is_no_terminal(week: LedgerFile, form: str) -> None:
    """When the bar is due, nothing is written to a file or a pipe but the answer."""
    done = subprocess.run(
        slow_question(UNTIL_THE_BAR_IS_DUE, "--format", form),
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert "Asking" not in done.stdout
    assert "4,142" in done.stdout or json.loads(done.stdout)["totals"]["spend"]["tokens"] == 4142
