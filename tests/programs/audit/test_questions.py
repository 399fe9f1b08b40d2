"""Audit commands as programs: imports, a progress bar, and terminals of every width."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from decimal import Decimal
from functools import cache

import pytest
from rich.cells import cell_len

from otel_limits.audit.answer import Column, Table
from otel_limits.cli.show.terminal_answer import fit, shortened
from otel_limits.core.limits import Breach
from tests.ledger.book import DAY, NINE, Call, Entry, write
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


# --- terminals of every width ---------------------------------------------------------------------

TOOLS = ["search_the_archive_of_quarterly_filings=1", "fetch"]
WIDTHS = (60, 80, 100, 120, 200)
every_width = pytest.mark.parametrize("width", WIDTHS)

AGENT = "research-assistant-for-quarterly-filings-emea"
MODEL = "us.anthropic.claude-sonnet-4-5-20250929-v1:0"


ASKED = {
    "spend": ["spend", "--by", "agent,model,day"],
    "wide": ["spend", "--by", "agent,model,day", "--wide"],
    "stops": ["stops"],
    "show": ["show", "00000001"],
    "verify": ["verify"],
    "loops": ["loops"],
    "tools": ["spend", "--by", "tool,agent"],
    "changes": ["spend", "--by", "agent", "--since", "2025-10-10", "--compare", "1d"],
    "grants": ["grants"],
}
END = "-- end of an answer --"
ASK_ALL = f"""
import json, sys
from otel_limits.cli import main
for arguments in json.loads(sys.argv[2]):
    if main(["audit", *arguments, "--ledger", sys.argv[1]]):
        sys.exit(f"failed: {{arguments}}")
    print({END!r})
"""


def on_terminal(ledger: LedgerFile, width: int, question: str) -> list[str]:
    """Return the lines of an answer in a terminal of this size, without colours."""
    answers = all_on_terminal(ledger, width).split(f"{END}\n")
    return answers[list(ASKED).index(question)].splitlines()


@cache
def all_on_terminal(ledger: LedgerFile, width: int, kind: str = "xterm") -> str:
    """Ask everything in a terminal of this size: starting takes longer than answering does."""
    main_end, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    asked = json.dumps(list(ASKED.values()))
    command = [sys.executable, "-c", ASK_ALL, str(ledger.path), asked]
    with subprocess.Popen(
        command, env=environment | {"TERM": kind}, stdin=terminal, stdout=terminal
    ) as process:
        os.close(terminal)
        chunks = []
        try:
            while chunk := os.read(main_end, 65_536):
                chunks.append(chunk)
        except OSError:  # how Linux says that the other end is closed
            pass
    os.close(main_end)
    assert process.returncode == 0
    shown = b"".join(chunks).decode()
    return re.sub(r"\x1b\[[0-9;]*m", "", shown).replace("\r", "")


@pytest.fixture(scope="module")
def wide_ledger(tmp_path_factory: pytest.TempPathFactory) -> LedgerFile:
    """Long names and large numbers: $21,789.63 of 123,456,789 tokens."""
    calls = [Call(input=123_000_000, output=456_789, price="21789.63", model=MODEL, tools=TOOLS)]
    calls += [Call(input=0, output=0, price="0", model=MODEL, tools=TOOLS)] * 2
    breach = Breach("max_turns", 1, 1, "max_turns", "turns")
    entries = [
        Entry(agent=AGENT, calls=calls, reason="max_turns", action="halted", breach=breach),
        Entry(agent="摘要を作る長い名前のエージェント・四半期", at=NINE + DAY),
    ]
    ledger = LedgerFile(tmp_path_factory.mktemp("wide") / "ledger.db")
    write(ledger.address, *entries)
    return ledger


@every_width
@pytest.mark.parametrize("question", [each for each in ASKED if each != "wide"])
def test_no_line_is_wider_than_the_terminal(
    question: str, width: int, wide_ledger: LedgerFile
) -> None:
    """A wrapped line breaks the table; a command below it is whole, to be copied."""
    lines = on_terminal(wide_ledger, width, question)
    too_wide = [line for line in lines if cell_len(line) > width]
    commands = [line for line in lines if ": otel-limits " in line]
    assert [line for line in too_wide if line not in commands] == []
    assert all(line.endswith("ledger.db") for line in commands)
    assert bool(commands) is (question == "verify")


def test_a_terminal_that_can_do_nothing_else_has_a_size_too(wide_ledger: LedgerFile) -> None:
    """In an editor, `TERM` is `dumb`, and the window as wide as any."""
    shown, expected = (all_on_terminal(wide_ledger, 60, kind) for kind in ("dumb", "xterm"))
    assert shown.partition(END)[0] == expected.partition(END)[0]


@every_width
def test_numbers_and_keys_are_there_at_every_width(width: int, wide_ledger: LedgerFile) -> None:
    """Cost and tokens are whole; agent, model and day are named; what is cut has a mark."""
    lines = on_terminal(wide_ledger, width, "spend")
    row = next(line for line in lines if "$21,789.63" in line)
    assert "123,456,789" in row
    assert "2025-10-09" in row
    agent, model = row.split()[:2]
    for name, whole in ((agent, AGENT), (model, MODEL)):
        before, _, behind = name.partition("…")
        assert len(name) >= 12 or name == whole
        assert whole.startswith(before)
        assert whole.endswith(behind)
        assert "…" in name or name == whole
    assert "calls" in " ".join(lines).lower()


def test_a_terminal_of_80_names_what_has_no_room(wide_ledger: LedgerFile) -> None:
    """The widest columns that are no keys, and how to see them."""
    told = "\n".join(on_terminal(wide_ledger, 80, "spend"))
    said = told.partition("Hidden: ")[2].partition(" shows them)")[0]
    assert "Input" in said
    assert said.endswith("(--wide")
    whole = on_terminal(wide_ledger, 80, "wide")
    assert not any("Hidden" in line for line in whole)
    assert AGENT in " ".join(whole)


@every_width
def test_reasons_and_agents_of_stops_stay(width: int, wide_ledger: LedgerFile) -> None:
    """Reason, agent and action are what a row of `stops` is known by."""
    lines = on_terminal(wide_ledger, width, "stops")
    row = next(line for line in lines if line.startswith("max_turns"))
    assert "halted" in row
    assert "$21,789.63" in "".join(lines)


def test_a_file_has_everything(wide_ledger: LedgerFile) -> None:
    """Where there is no terminal, nothing is left out, whatever COLUMNS says."""
    text = "".join(in_a_file(wide_ledger, "spend"))
    assert AGENT in text
    assert MODEL in text
    assert "Hidden" not in text


def in_a_file(ledger: LedgerFile, question: str) -> list[str]:
    """Return the lines of an answer that are not for a terminal."""
    command = [sys.executable, "-m", "otel_limits.cli", "audit", *ASKED[question]]
    done = subprocess.run(
        [*command, "--ledger", str(ledger.path)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": "40"},
    )
    return done.stdout.splitlines()


def test_many_keys_stand_under_each_other() -> None:
    """Where not even the keys have room, a row has one value per line and loses none."""
    columns = [Column(f"k{n}", f"Key {n}", is_key=True) for n in range(6)]
    table = Table(name="t", title="T", columns=columns, rows=[[f"value-{n}" * 4 for n in range(6)]])
    layout = fit(table, 40)
    assert not layout.left_out
    assert [f"value-{n}" * 4 in "".join(layout.body) for n in range(6)] == [True] * 6
    assert max(map(len, layout.body)) <= 40


def test_many_rows_fit_too() -> None:
    """A table of a thousand rows is laid out as one of ten."""
    columns = [Column("agent", "Agent", is_key=True), Column("cost", "Cost", "money")]
    rows = [["a" * 100, Decimal("12345.67")]] * 1000
    layout = fit(Table(name="t", title="T", columns=columns, rows=rows), 60)
    assert {len(line) for line in layout.body} == {60}


def test_a_name_is_shortened_in_its_middle() -> None:
    """The start and end distinguish names; an ID keeps the part that `show` finds it by."""
    assert shortened("research-emea", 9) == "rese…emea"
    assert shortened("0123456789abcdef", 9, keep_beginning=True) == "01234567…"
    assert cell_len(shortened("摘要摘要摘要", 7)) <= 7


@every_width
@pytest.mark.parametrize("question", ["tools", "changes", "show"])
def test_money_is_whole_in_every_answer(question: str, width: int, wide_ledger: LedgerFile) -> None:
    """Cost per tool, changes, and usage of a tree."""
    lines = on_terminal(wide_ledger, width, question)
    assert any("$21,789.63" in line for line in lines)
    if question == "changes":
        assert any("-$21,789.63" in line and "emea" in line for line in lines)


def test_columns_of_zeros_make_room_first() -> None:
    """A wider one with numbers stays: zeros say less."""
    columns = (
        Column("agent", "Agent", is_key=True),
        Column("unpriced", "Unpriced", "count"),
        Column("cost", "Cost of it", "money"),
    )
    rows = [("research", 0, Decimal(12)), ("reader", 0, None)]
    layout = fit(Table(name="t", title="Spend", columns=columns, rows=rows), 16)
    assert not layout.left_out  # not named either
    assert "Unpriced" not in layout.head[0]
    assert "Cost" in layout.head[0]
    # Also before a name is shortened.
    rows = [("research-assistant", 0, Decimal(12))]
    layout = fit(Table(name="t", title="Spend", columns=columns, rows=rows), 33)
    assert "Unpriced" not in layout.head[0]
    assert "research-assistant" in layout.body[0]


def test_empty_table_is_labeled(wide_ledger: LedgerFile) -> None:
    """Headings over nothing look as if something were missing, also in a file."""
    for lines in (on_terminal(wide_ledger, 80, "grants"), in_a_file(wide_ledger, "grants")):
        assert lines[lines.index("Quota changes") + 1] == "None."
