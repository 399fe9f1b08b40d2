"""Durability when processes record, are killed, end, fork or write concurrently."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits import enable
from otel_limits.cli import main
from otel_limits.ledger.address import parse
from otel_limits.ledger.spill import SpillFiles
from otel_limits.observers.ledger import LedgerObserver
from otel_limits.runs.registry import LIVE
from otel_limits.testing import ScriptedModel, says, uses
from tests.ledger.fixtures import eventually
from tests.unit.ledger.test_writer import (
    has_tables,
    restore,
    rows_of,
    whole,
)

if TYPE_CHECKING:
    from strands import Agent

    from tests.conftest import MakeAgent
    from tests.ledger.fixtures import LedgerFile


COMMAND = str(Path(sys.executable).with_name("otel-limits"))

Start = Callable[..., "subprocess.Popen[str]"]

AGENT = """
import os, signal, sys, threading, time
import otel_limits
from strands import Agent, tool
from otel_limits.testing import ScriptedModel, endless, says, uses

otel_limits.enable(otel_limits.Limits(max_turns=3))

@tool
def look() -> str:
    "Look."
    return "nothing"

def run(turns=3):
    model = ScriptedModel(endless(uses("look")))
    Agent(model=model, tools=[look], callback_handler=None, name="worker")("go")
"""

RUNS_FOR_EVER = (
    AGENT
    + """
while True:
    run()
    print("acknowledged")
"""
)


@pytest.fixture
def worker(make_agent: MakeAgent) -> Agent:
    """An agent that takes two model calls per invocation."""

    def script() -> Any:
        while True:
            yield uses("search")
            yield says("x")

    return make_agent(ScriptedModel(script()))


# --- the process ends -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "end"), [(1, signal.SIGKILL), (4, signal.SIGTERM), (9, signal.SIGKILL)]
)
def test_a_signal_loses_no_acknowledged_row(
    program: Start, ledger: LedgerFile, end: signal.Signals, after: int
) -> None:
    """Every invocation that returned before the signal is in the ledger, or in a spill file."""
    child = program(RUNS_FOR_EVER)
    assert child.stdout is not None
    for _ in range(after):
        assert child.stdout.readline() == "acknowledged\n"
    child.send_signal(end)
    rest, _ = child.communicate()
    acknowledged = after + rest.count("acknowledged\n")
    restore(ledger)
    assert whole(ledger) >= acknowledged


def test_with_call_every_call_is_durable(program: Start, ledger: LedgerFile) -> None:
    """A process that kills itself within a tool has recorded the call that asked for it."""
    text = AGENT.replace('return "nothing"', "os.kill(os.getpid(), signal.SIGKILL)") + "run()\n"
    child = program(text, OTEL_LIMITS_LEDGER_SYNC="call")
    child.communicate()
    restore(ledger)
    assert [call["number"] for call in ledger.calls()] == [1]


TWO_TURNS = (
    AGENT.replace('return "nothing"', "turn(); return 'nothing'")
    + """
import otel_limits.ledger.writer
turns = []

def turn():
    turns.append("turn")
    print("turn", len(turns))
    input()
    otel_limits.ledger.writer.GATHER_SECONDS = 3600.0

run()
"""
)
"""Every tool call waits for a line; what follows the first is gathered for an hour."""

FAILS_MEANWHILE = (
    AGENT
    + """
import asyncio

@tool
async def wait() -> str:
    "Wait for ever."
    begun.set()
    await asyncio.Event().wait()

async def main():
    global begun
    begun = asyncio.Event()
    agent = Agent(model=ScriptedModel(endless(uses("wait"))), tools=[wait], callback_handler=None)
    task = asyncio.create_task(agent.invoke_async("go"))
    await begun.wait()
    raise RuntimeError("nobody catches this")

asyncio.run(main())
"""
)

GATHERS_FOR_EVER = """
import otel_limits.ledger.writer
otel_limits.ledger.writer.GATHER_SECONDS = 3600.0
"""


def kill(child: subprocess.Popen[str]) -> None:
    """End a program as the kernel does that has no memory left, and wait for that."""
    child.kill()
    child.communicate()


def test_background_keeps_what_it_has_gathered(program: Start, ledger: LedgerFile) -> None:
    """Rows are written even if no caller waits for them, and survive SIGKILL."""
    text = AGENT + "run(); print('returned'); input()\n"
    child = program(text, OTEL_LIMITS_LEDGER_SYNC="background")
    wait_for_line(child, "returned")
    eventually(lambda: has_tables(ledger) and whole(ledger) == 1)
    kill(child)
    restore(ledger)
    assert whole(ledger) == 1


def test_background_loses_what_it_still_gathers(program: Start, ledger: LedgerFile) -> None:
    """SIGKILL costs the rows of what returned a moment ago, and none that was written before."""
    returns = "run(); print('returned'); input()\n"
    text = AGENT + returns + GATHERS_FOR_EVER + returns
    child = program(text, OTEL_LIMITS_LEDGER_SYNC="background")
    wait_for_line(child, "returned")
    eventually(lambda: has_tables(ledger) and whole(ledger) == 1)
    send_line(child)
    wait_for_line(child, "returned")
    kill(child)
    restore(ledger)
    assert (len(ledger.invocations()), whole(ledger)) == (1, 1)


@pytest.mark.parametrize("sync", ["invocation", "background"])
def test_an_invocation_under_way_loses_what_is_still_gathered(
    program: Start, ledger: LedgerFile, sync: str
) -> None:
    """SIGKILL within its second turn: its beginning and first call were written, no more was."""
    child = program(TWO_TURNS, OTEL_LIMITS_LEDGER_SYNC=sync)
    wait_for_line(child, "turn 1")
    eventually(lambda: has_tables(ledger) and len(ledger.calls()) == 1)
    send_line(child)
    wait_for_line(child, "turn 2")
    kill(child)
    restore(ledger)
    (invocation,) = ledger.invocations()
    assert invocation["ended_us"] is None
    assert [call["number"] for call in ledger.calls()] == [1]


def send_line(child: subprocess.Popen[str]) -> None:
    """Let a program go on that waits for a line."""
    assert child.stdin is not None
    child.stdin.write("go on\n")
    child.stdin.flush()


def wait_for_line(child: subprocess.Popen[str], line: str) -> None:
    """Wait until a program says something."""
    assert child.stdout is not None
    assert child.stdout.readline() == line + "\n"


def test_an_exception_loses_nothing_of_what_is_under_way(
    program: Start, ledger: LedgerFile
) -> None:
    """A program that fails while an agent is at work has recorded what the agent has called."""
    child = program(FAILS_MEANWHILE, OTEL_LIMITS_LEDGER_SYNC="background")
    _, errors = child.communicate(timeout=60)
    assert (child.returncode, "RuntimeError: nobody catches this" in errors) == (1, True), errors
    restore(ledger)
    assert len(ledger.invocations()) == 1
    assert [call["number"] for call in ledger.calls()] == [1]


def test_background_loses_nothing_at_a_normal_end(program: Start, ledger: LedgerFile) -> None:
    """Rows still in memory when a program ends are written then."""
    child = program(AGENT + "run(); run()\n", OTEL_LIMITS_LEDGER_SYNC="background")
    _, errors = child.communicate()
    assert child.returncode == 0, errors
    assert whole(ledger) == 2


def test_a_failing_end_loses_nothing(program: Start, ledger: LedgerFile) -> None:
    """The same after an uncaught exception."""
    child = program(AGENT + "run()\nraise SystemExit(3)\n", OTEL_LIMITS_LEDGER_SYNC="background")
    child.communicate()
    assert (child.returncode, whole(ledger)) == (3, 1)


FORKS = (
    AGENT
    + """
import threading
run()  # a fork during another thread's import cannot be made safe
busy = threading.Thread(target=lambda: [run() for _ in range(29)])
busy.start()
children = []
for number in range(8):
    child = os.fork()
    if child == 0:
        run()
        os._exit(0)
    children.append(child)
print(sum(os.waitpid(child, 0)[1] for child in children))
busy.join()
"""
)


def test_forks_lose_and_double_nothing(program: Start, ledger: LedgerFile) -> None:
    """Children of a busy parent record their own invocations, and leave the parent's to it."""
    child = program(FORKS)
    output, errors = child.communicate(timeout=100)
    assert output == "0\n", errors
    restore(ledger)
    rows = ledger.invocations()
    assert (len(rows), whole(ledger)) == (38, 38)
    assert len(ledger.calls()) == 38 * 3


READ_ONLY = """
from pathlib import Path
from otel_limits import InternalError
run()
otel_limits.disable()
for path in Path(os.environ["OTEL_LIMITS_LEDGER"]).parent.glob("ledger.db*"):
    path.chmod(0o444)
os.setgid(65534)
os.setuid(65534)
has_failed = threading.Event()
def watch(event):
    if isinstance(event, InternalError) and event.component == "ledger":
        has_failed.set()
otel_limits.enable(max_turns=3, observers=[watch])
run()
has_failed.wait()
"""


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or (os.geteuid() != 0 and os.environ.get("CI") != "true"),
    reason="Only root can switch to a user without write permission.",
)
def test_a_read_only_file(ledger: LedgerFile, tmp_path: Path, program: Start) -> None:
    """Rows of a program without write permission wait next to the ledger for one that has it."""
    open_the_way(tmp_path)
    child = program(AGENT + READ_ONLY)
    _, errors = child.communicate()
    assert (child.returncode, "rows spilled to" in errors) == (0, True), errors
    assert ledger.spills()
    restore(ledger)
    assert whole(ledger) == 2


def open_the_way(path: Path) -> None:
    """Let all users reach a directory, and write into it."""
    path.chmod(0o777)
    for parent in path.parents:
        if parent.stat().st_mode & 0o005 != 0o005:
            parent.chmod(parent.stat().st_mode | 0o055)


NO_ROOM = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
"""


def test_a_full_disk(program: Start, ledger: LedgerFile) -> None:
    """On a full disk, rows stay in memory; the agent never feels it."""
    child = program(AGENT + NO_ROOM + "for _ in range(200): run()\nprint('done')\n")
    output, errors = child.communicate(timeout=100)
    assert output == "done\n", errors
    assert "rows spilled to" in errors
    restore(ledger)
    assert whole(ledger) > 50


def test_verify_names_the_log_for_losses_of_a_full_disk(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """No book can contain what no file accepted."""
    observer = LedgerObserver(ledger.address)
    observer.writer.put(rows_of("i"))
    observer.close()
    assert main(["audit", "verify", "--format", "json"]) == 0
    complete = json.loads(capsys.readouterr().out)["complete"]
    assert "rows that a process lost on a full disk are only in its log" in complete


# --- spill files ----------------------------------------------------------------------------------


def test_a_spill_of_a_dead_process_is_taken_by_the_next(
    ledger: LedgerFile, program: Start, worker: Agent
) -> None:
    """Rows of a killed process are restored once the broken database works again."""
    ledger.path.mkdir()
    child = program(RUNS_FOR_EVER)
    assert child.stdout is not None
    assert child.stdout.readline() == "acknowledged\n"
    child.kill()
    rest, _ = child.communicate()
    ledger.path.rmdir()
    enable()
    worker("go")
    assert whole(ledger) >= 2 + rest.count("acknowledged")


def test_a_spill_of_a_live_process_is_left_alone(ledger: LedgerFile) -> None:
    """A file that is still appended to is left alone."""
    spill = SpillFiles(ledger.address)
    row = ("otel_limits_attributes", {"invocation_id": "i", "key": "k", "value": "v"})
    spill.append([row], to_disk=True)
    ask = [COMMAND, "ledger", "import", os.devnull]  # fails, as it has no model call
    subprocess.run(ask, check=False, capture_output=True)
    assert len(ledger.spills()) == 1
    spill.seal()
    subprocess.run(ask, check=False, capture_output=True)
    assert ledger.attributes() == {("i", "k"): "v"}


# --- concurrency ----------------------------------------------------------------------------------

EIGHT = """
import sys
from pathlib import Path
from otel_limits.core.events import Invocation, ModelCall
from otel_limits.ledger.address import parse
from otel_limits.core.usage import Usage
from otel_limits.observers.ledger import LedgerObserver

number, address, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
observer = LedgerObserver(parse("test", address, Path(sys.argv[4])), "background")
invocation = Invocation(agent=number, id=number, root_id=number, trace_id=number * 32)
for each in range(1, rows + 1):
    observer(ModelCall(invocation=invocation, number=each, model="m", kind="measured",
                       usage=Usage(input=each), estimated=False, span_id=f"{each:016x}",
                       seconds=None))
observer.close()
"""


def record_from_processes(address: str, directory: Path, processes: int, rows: int) -> None:
    """Let several processes record model calls concurrently."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", EIGHT, str(number), address, str(rows), str(directory / "data")]
        )
        for number in range(processes)
    ]
    assert [child.wait() for child in children] == [0] * processes


def test_eight_processes_in_one_file(ledger: LedgerFile) -> None:
    """Eight processes record 500 model calls each into one file: every row is there, once."""
    record_from_processes(str(ledger.path), ledger.path.parent, 8, 500)
    restore(ledger)
    connection = sqlite3.connect(ledger.path)
    found = connection.execute(
        "SELECT agent, count(*), count(DISTINCT number), sum(input_tokens)"
        " FROM otel_limits_model_calls GROUP BY 1 ORDER BY 1"
    ).fetchall()
    connection.close()
    assert found == [(str(n), 500, 500, 125_250) for n in range(8)]


def test_an_exit_while_the_database_hangs_is_short(program: Start, ledger: LedgerFile) -> None:
    """The rows of the end go to a spill file, and the process ends."""
    connection = sqlite3.connect(ledger.path, isolation_level=None)
    connection.execute("CREATE TABLE other (x)")
    connection.execute("BEGIN EXCLUSIVE")
    child = program(AGENT + "run()\n", OTEL_LIMITS_LEDGER_SYNC="background")
    _, errors = child.communicate(timeout=60)
    connection.close()
    assert child.returncode == 0, errors
    restore(ledger)
    assert whole(ledger) == 1


def test_the_log_names_no_password() -> None:
    """An address is written without its password wherever it is written."""
    address = parse("x", "postgresql://bob:s3cret@db.example/ledger?password=s3cret", Path("/d"))
    assert "s3cret" not in f"{address} {address!r}"
    assert re.fullmatch(
        r"postgresql\+psycopg://bob:\*\*\*@db.example/ledger\?password=\*\*\*", str(address)
    )
    assert LIVE.audit_keys == ()


# --- several processes ----------------------------------------------------------------------------

SEEDED = """
import random
import otel_limits
from strands import Agent
from otel_limits.testing import ScriptedModel, says

otel_limits.enable()
for _ in range(5):
    random.seed(42)
    Agent(model=ScriptedModel([says("x")]), callback_handler=None)("go")
"""


def test_seeded_workers_lose_no_call(
    ledger: LedgerFile, program: Callable[..., subprocess.Popen[str]]
) -> None:
    """Four processes with the same seed, concurrently, in one ledger."""
    for child in [program(SEEDED) for _ in range(4)]:
        _, said = child.communicate(timeout=60)
        assert child.returncode == 0, said
    assert len(ledger.calls()) == 20


def test_no_ledger_costs_nothing() -> None:
    """Without a ledger SQLAlchemy is never imported."""
    program = (
        "import sys, otel_limits\n"
        "otel_limits.enable()\n"
        "from otel_limits.cli.parser import make_parser\n"
        "make_parser()\n"
        "print([name for name in sys.modules if name.startswith('sqlalchemy')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
