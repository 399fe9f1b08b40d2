"""The rooms of the package: their table, their sizes, and the way of one model call."""

from __future__ import annotations

import ast
import asyncio
import io
import os
import re
import subprocess
import sys
import tempfile
import threading
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import otel_limits

ROOT: Final = Path(otel_limits.__file__).parent

ROOMS: Final = (
    "startup",
    "vendors",
    "core",
    "usage",
    "runs",
    "otel",
    "bindings",
    "ledger",
    "observers",
    "quotas",
    "settings",
    "runtime",
    "dashboards",
    "audit",
    "docs",
    "top",
    "demo",
    "cli",
)
"""Each imports only from itself and from those before it."""

ENTRIES: Final = (
    "`plugin.py`, `testing.py`, `frameworks.py`, `instrumentor.py`, `environment_variables.py`, "
    "`__init__.py`"
)
PUBLIC: Final = (
    ENTRIES,
    "The public names, and the entry points of OpenTelemetry",
    "calls of an application",
    "calls of the rooms",
    "every room",
)
LABELS: Final = ("In", "Out", "May touch")


def described(room: str) -> tuple[str, ...]:
    """Return what a room is, what comes in, what goes out, and what it may touch."""
    docstring = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text("utf-8"))) or ""
    found = [docstring.partition("\n\n")[0]]
    for label in LABELS:
        text = re.search(
            rf"^{label}: (.*?)(?=\n\n|\n(?:{'|'.join(LABELS)}): |\Z)",
            docstring,
            re.MULTILINE | re.DOTALL,
        )
        if text is None:
            raise ValueError(f"The docstring of {room} has no line `{label}:`.")
        found.append(text[1])
    return tuple(_cell(" ".join(part.split())) for part in found)


def _cell(text: str) -> str:
    """Return a text without its full stop, unless it has several sentences."""
    return text if ". " in text else text.removesuffix(".")


def rooms_table() -> str:
    """Format the table of rooms, from the docstrings of their first files."""
    rows = [(f"`{room}`", *described(room)) for room in ROOMS]
    lines = [("Room", "Contents", *LABELS), ("---",) * 5, *rows, PUBLIC]
    return (
        "".join(f"| {' | '.join(row)} |\n" for row in lines)
        .replace("| --- ", "|---")
        .replace("|--- |", "|---|")
    )


# --- sizes ----------------------------------------------------------------------------------------

NOT_CODE: Final = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
BLOCK: Final = 250
"""Lines of code for each block of the picture."""


def lines_of_code(path: Path) -> int:
    """Count the lines with code: without comments, blank lines and docstrings."""
    source = path.read_text("utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def sizes_picture() -> str:
    """Draw the rooms in their order, with their lines of code and their files."""
    rows = []
    for room in ROOMS:
        files = [path for path in (ROOT / room).rglob("*.py") if path.name != "__init__.py"]
        total = sum(map(lines_of_code, (ROOT / room).rglob("*.py")))
        blocks = "█" * max(1, round(total / BLOCK))
        rows.append(f"{room:<11}{round(total, -2) or 100:>7,}{len(files):>7}  {blocks}\n")
    return f"```text\n{'room':<11}{'lines':>7}{'files':>7}\n{''.join(rows)}```\n"


# --- the way of one model call --------------------------------------------------------------------


def _strands() -> Callable[[], object]:
    from strands import Agent

    from otel_limits.testing import ScriptedModel, says

    return lambda: Agent(model=ScriptedModel([says("Done.")]), callback_handler=None)("Go.")


def _langchain() -> Callable[[], object]:
    from langchain.agents import create_agent

    from otel_limits.testing import ScriptedChatModel, says

    asked: Any = {"messages": [("user", "Go.")]}
    return lambda: create_agent(ScriptedChatModel([says("Done.")]), []).invoke(asked)


def _openai_agents() -> Callable[[], object]:
    from agents import Agent, Runner
    from agents.run import RunConfig

    from otel_limits.testing import ScriptedAgentsModel, says

    def run() -> object:
        agent = Agent(name="agent", model=ScriptedAgentsModel([says("Done.")]))
        return asyncio.run(Runner.run(agent, "Go.", run_config=RunConfig(tracing_disabled=True)))

    return run


AGENTS: Final[Mapping[str, tuple[str, Callable[[], Callable[[], object]]]]] = {
    "strands": ("Strands", _strands),
    "langchain": ("LangChain", _langchain),
    "openai_agents": ("OpenAI Agents SDK", _openai_agents),
}
PHASES: Final = ("An invocation begins", "A call is decided and sent", "Its answer counts")
SENDS: Final = "bindings/model_call"
ANSWERS: Final = "bindings/script"
AROUND: Final = {"core/internal_errors", "bindings/class_patches", ANSWERS}
"""Guards, wrappers, and the model of the test."""


@contextmanager
def _watched(seen: list[str]) -> Iterator[None]:
    """Note each file of the package whose functions are called, in this and in new threads."""
    from otel_limits import flush

    prefix = f"{ROOT}/"

    def note(frame: Any, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(prefix):
            seen.append(name.removeprefix(prefix).removesuffix(".py"))

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
        flush()  # the thread of the ledger writes later
        threading.setprofile(before)


def _way(run: Callable[[], object]) -> list[list[str]]:
    """Return the files that one invocation with one model call uses, by phase, in order."""
    with _watched([]):  # what is imported or made once
        run()
    seen: list[str] = []
    with _watched(seen):
        run()
    sent = seen.index(SENDS)
    answered = next(n for n, name in enumerate(seen) if n > sent and "/scripted_" in name)
    parts = (seen[:sent], seen[sent:answered], seen[answered:])
    return [
        [name for name in dict.fromkeys(part) if name not in AROUND and "/scripted_" not in name]
        for part in parts
    ]


def _linked(names: Sequence[str]) -> str:
    return " → ".join(f"`{name}`" for name in names)


def way_table() -> str:
    """Format the files through which a model call goes, observed in a new process."""
    settings = {
        name: os.environ[name] for name in ("HOME", "PATH", "PYTHONPATH") if name in os.environ
    }
    with tempfile.TemporaryDirectory() as directory:
        return subprocess.run(
            [sys.executable, "-m", "tests.rooms"],
            check=True,
            capture_output=True,
            encoding="utf-8",
            cwd=ROOT.parent,
            env={**settings, "OTEL_LIMITS_LEDGER": f"{directory}/ledger.db"},
        ).stdout


def observed_way() -> str:
    """Run an agent of each framework, and format the files that its model call used."""
    from otel_limits import disable, enable

    enable(max_turns=5)
    try:
        ways = {package: _way(make()) for package, (_, make) in AGENTS.items()}
    finally:
        disable()
    rows: list[Sequence[str]] = [
        ("", *(label for label, _ in AGENTS.values()), "In all three"),
        ("---",) * (len(AGENTS) + 2),
    ]
    for number, phase in enumerate(PHASES):
        parts = {package: way[number] for package, way in ways.items()}
        first, *others = parts.values()
        shared = [name for name in first if all(name in other for other in others)]
        own = [
            _linked([name.rpartition("/")[2] for name in part if f"/{package}/" in name])
            for package, part in parts.items()
        ]
        rows.append((phase, *own, _linked(shared)))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    sys.stdout.write(observed_way())
