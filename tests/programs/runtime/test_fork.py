"""Locks and registries survive a fork while another thread holds them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="This system cannot fork.")

PROGRAM = """
import os, signal, threading, warnings
import otel_limits
from otel_limits.runs.registry import LIVE
from otel_limits.testing import ScriptedModel, endless, says, uses
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import REGISTRY, generate_latest
from strands import Agent, tool

warnings.simplefilter("ignore", DeprecationWarning)

@tool
def look() -> str:
    "Look."
    return "nothing"

def run(turns=2):
    model = ScriptedModel(endless(uses("look")))
    result = Agent(model=model, tools=[look], callback_handler=None, name="forked")("go")
    assert (result.stop_reason, model.calls) == ("max_turns", turns), result.stop_reason

trace.set_tracer_provider(TracerProvider())
otel_limits.enable(otel_limits.Limits(max_turns=2, max_duration_seconds=600))
run()
stop = threading.Event()

def load():
    while not stop.is_set():
        LIVE.now()
        with LIVE.lock:
            pass
        generate_latest()
        LIVE.observers.publish(otel_limits.Fault(component="load"))

threads = [threading.Thread(target=load) for _ in range(4)]
for thread in threads:
    thread.start()
failed = 0
for number in range(FORKS):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            assert len(LIVE) == 0
            run()
            generate_latest()
            os._exit(0)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
    failed += os.waitpid(child, 0)[1] != 0
stop.set()
for thread in threads:
    thread.join()
run()
print("failed", failed)
"""


def test_children_of_a_busy_process_are_limited() -> None:
    """Twenty forks while four threads count and scrape: no child hangs, each is halted exactly."""
    program = textwrap.dedent(PROGRAM).replace("FORKS", "20")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=110, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "failed 0"), done.stderr[-2000:]


LIVE_FORK = """
import os, threading
import otel_limits
from otel_limits.runs.registry import LIVE
from otel_limits.testing import ScriptedModel, says, uses
from strands import Agent, tool

stops = []

def note(event):
    if isinstance(event, otel_limits.Stop):
        stops.append(event)

otel_limits.enable(observers=[note])

@tool
def split() -> str:
    "Fork within an invocation."
    child = os.fork()
    if child == 0:
        os._exit(len(LIVE) + len(stops))
    return str(os.waitpid(child, 0)[1])

model = ScriptedModel([uses("split"), says("done")])
agent = Agent(model=model, tools=[split], callback_handler=None)
agent("go")
print(agent.messages[2]["content"][0]["toolResult"]["content"][0]["text"], len(stops), len(LIVE))
"""


def test_the_invocations_of_a_parent_stay_the_parents() -> None:
    """A child that is forked within an invocation has none, and the parent's ends once."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LIVE_FORK],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["0", "1", "0"], done.stderr[-2000:]


FORK_IN_TOOL = """
import asyncio, multiprocessing, os, threading
from concurrent.futures import ProcessPoolExecutor
import otel_limits
from otel_limits.testing import ScriptedModel, endless, says, uses
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from strands import Agent, tool

trace.set_tracer_provider(TracerProvider())
started = {}

def note(event):
    if isinstance(event, otel_limits.Started):
        started[event.invocation.agent] = event.invocation

otel_limits.enable(tree=otel_limits.Limits(max_turns=6), observers=[note])
context = multiprocessing.get_context("fork")

@tool
def look() -> str:
    "Look."
    return "nothing"

def run_child(results):
    for name in ("first", "second"):
        model = ScriptedModel(endless(uses("look")))
        agent = Agent(model=model, tools=[look], callback_handler=None, name=name)
        if name == "first":
            agent("go")
        else:  # a thread inherits OpenTelemetry's context only
            thread = threading.Thread(target=agent, args=("go",))
            thread.start()
            thread.join()
        results.append((model.calls, started[name].parent_id))

def in_pool(_):
    results = []
    run_child(results)
    return results

def by_fork():
    reader, writer = os.pipe()
    if os.fork() == 0:
        results = []
        run_child(results)
        os.write(writer, repr(results).encode())
        os._exit(0)
    return os.read(reader, 1000).decode()

def by_pool():
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return repr(pool.submit(in_pool, 0).result())

@tool
def fork_in_thread() -> str:
    "Run agents in a forked child."
    return WAY()

@tool
async def fork_in_task() -> str:
    "Run agents in a forked child."
    return await asyncio.to_thread(WAY)

for name in ("fork_in_thread", "fork_in_task"):
    model = ScriptedModel([uses(name), says("done")])
    agent = Agent(
        model=model, tools=[fork_in_thread, fork_in_task], callback_handler=None, name="parent"
    )
    agent("go")
    print(agent.messages[2]["content"][0]["toolResult"]["content"][0]["text"])
"""


@pytest.mark.parametrize("way", ["by_fork", "by_pool"])
def test_agents_of_a_tools_forked_child_have_their_own_tree(way: str) -> None:
    """The parent's tree stays in the parent: a copy of it would halt the child too early."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK_IN_TOOL.replace("WAY", way)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == ["[(6, None), (6, None)]"] * 2, done.stderr[-2000:]


READS_ITS_POLICY = """
import os, signal, threading, warnings
import otel_limits
from otel_limits.runtime.runtime import RUNTIME
from otel_limits.testing import FakeTime

warnings.simplefilter("ignore", DeprecationWarning)
path, open_file = os.environ["OTEL_LIMITS_POLICY"], os.open
is_reading, has_forked = threading.Event(), threading.Event()

def open_slowly(name, *how):
    if name == path and threading.current_thread() is reader:
        is_reading.set()
        has_forked.wait()
    return open_file(name, *how)

otel_limits.enable()
os.open = open_slowly
with open(path, "w") as file:
    file.write("defaults: {action: raise}")
with FakeTime() as time:
    time.advance(5)
    reader = threading.Thread(target=RUNTIME.policy, args=("tester",))
    reader.start()
    is_reading.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        time.advance(5)
        os._exit(RUNTIME.policy("tester").action != "raise")
    has_forked.set()
    reader.join()
    print(os.waitpid(child, 0)[1])
"""


def test_child_of_a_process_that_reads_its_policy_file_reads_it_too(tmp_path: Path) -> None:
    """The thread that reads holds a lock, and is not in the child."""
    path = tmp_path / "limits.yaml"
    path.write_text("defaults: {action: observe}")
    done = subprocess.run(
        [sys.executable, "-c", READS_ITS_POLICY],
        env={**os.environ, "OTEL_LIMITS_POLICY": str(path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
