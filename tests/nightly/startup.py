"""Measures the CPU time of commands, and what `run` and `doctor` add to the imports of a framework.

Usage: python -m tests.nightly.startup [RUNS]

The exit status is 1 if a time is above its bound. Times include child processes, and are the least
of several runs with compiled bytecode: whatever else runs on the machine only adds to that.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

RUNS: Final = 5

COMMAND: Final = str(Path(sys.executable).with_name("otel-limits"))

FRAMEWORKS: Final = {"Strands": "strands", "LangChain": "langchain.agents", "SDK": "agents"}

MOST_SECONDS: Final = {
    "check": 1.5,
    **{f"run, {name}": 0.5 for name in FRAMEWORKS},
    **{f"doctor, {name}": 2.0 for name in FRAMEWORKS},
}
"""Bounds on a slow core, without the imports of the framework. Plain `doctor` has none: it runs an
agent of each installed framework."""

IMPORTS: Final = {"run": 1, "doctor": 2}
"""How often a command imports a framework: `doctor` does so in a child process, too."""


def cpu_seconds(*command: str) -> float:
    """Return the user and system time of a command and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):  # `doctor` finds mistakes
        sys.exit(done.stderr.decode(errors="replace"))
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measured(runs: int) -> dict[str, float]:
    """Measure everything in turns, after a first run that compiles the bytecode."""
    run = (COMMAND, "run", "--max-turns", "3", "--")
    doctor = (COMMAND, "doctor", "--", COMMAND, "run", "--")
    bare = {
        name: (sys.executable, "-c", f"import {module}")
        for name, module in FRAMEWORKS.items()
        if find_spec(module.partition(".")[0]) is not None
    }
    programs = {
        "check": (COMMAND, "check"),
        **{f"run, {name}": (*run, *command) for name, command in bare.items()},
        **{f"doctor, {name}": (*doctor, *command) for name, command in bare.items()},
        "doctor": (*doctor, sys.executable),
    }
    commands = {**bare, **programs}
    times: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(runs + 1):
        for name, command in commands.items():
            seconds = cpu_seconds(*command)
            if turn:
                times[name].append(seconds)
    least = {name: min(each) for name, each in times.items()}
    for name in programs:
        kind, _, framework = name.partition(", ")
        if framework:
            least[name] -= IMPORTS[kind] * least[framework]
    return {name: least[name] for name in programs}


def main(arguments: list[str]) -> int:
    """Print the times; return 1 if one is above its bound."""
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_DATA_HOME"] = directory  # for the ledger of `run`
        times = measured(int(arguments[0]) if arguments else RUNS)
    exceeded = False
    for name, seconds in times.items():
        bound = MOST_SECONDS.get(name)
        is_above = bound is not None and seconds > bound
        exceeded = exceeded or is_above
        limit = "" if bound is None else f"   at most {bound} s"
        sys.stdout.write(f"{name:<18}{seconds:6.2f} s{limit}{', EXCEEDED' if is_above else ''}\n")
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
