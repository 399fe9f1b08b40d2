"""Runs the commands of README and pages, and writes their outputs: `python -m tests.pages`.

A block `console` is a session: a line that begins with `$ ` is a command, and what follows is what
it prints. A block without any `$ ` has one command in each line, and shows no output. The commands
of a page are run in their order, in one directory, at one moment (`NOW`), on a terminal of 100
columns without colours. What differs from one machine to the next is replaced, as `UNSTEADY` says,
and `[...]` stands for whatever is left out.

A block whose first line is a comment with the name of a file, such as `# app.py`, is that file.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Final
from unittest.mock import patch

from otel_limits.cli import main
from otel_limits.cli.parser import make_parser
from otel_limits.demo import record
from tests.ledger.otlp import attributes
from tests.processes import PATIENCE_SECONDS
from tests.readme import PAGES, README, ROOT
from tests.top.test_live import Terminal

EVERY: Final = (README, *PAGES, ROOT / "dashboards/README.md", ROOT / ".github/CONTRIBUTING.md")
NOW: Final = 1_795_420_800.0
"""2026-11-23 08:00:00 UTC, a Monday, for what is run in this process."""
LEFT_OUT: Final = "[...]"
"""What stands in the pages for lines that are left out."""
HOME: Final = "/srv/agents"
"""What stands in the pages for the directory in which the commands are run."""

TERMINAL: Final = {"TERM": "dumb", "COLUMNS": "100", "LINES": "50"}
BLOCK: Final = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE: Final = re.compile(r"# ([\w./-]+\.\w+)\n")
PROGRAM: Final = """\
from strands import Agent
from otel_limits.testing import ScriptedModel, says
Agent(model=ScriptedModel([says("done")]), callback_handler=None)("go")
"""
"""What `app.py` is in a page that shows none."""
UNSTEADY: Final = (
    (re.compile(r"\b127\.0\.0\.1:\d+"), "127.0.0.1:PORT"),
    (re.compile(r"\b\d+\.\d s\b"), "0.0 s"),
    (re.compile(r"strands-agents \d+(\.\d+)+"), "strands-agents VERSION"),
    (re.compile(r"/usr/bin/python[\d.]*"), "/usr/bin/python"),
)
"""Ports, durations, versions of others, and names of Python: two outputs are the same without."""

IN_A_PROCESS: Final = frozenset({"run", "doctor", "autoload", "demo"})
"""Commands that become another program, or start some."""
FOREIGN: Final = frozenset(
    {"pip", "docker", "kubectl", "pytest", "ruff", "python", "opentelemetry-instrument"}
    | {"ACL", ".ci/run", "gunicorn", "uvicorn", "celery", "sam", "aws", "jupyter"}
)
"""Programs of others, and what is said to Redis: tests of their own run them where they can."""
STORE: Final = "redis://localhost:6379/0"
PROMETHEUS: Final = "http://localhost:9090"
ENDPOINTS: Final = ("worker-1:9464", "worker-2:9464")
"""Where the pages have servers. A test that has some says which addresses take their places."""
NEEDED: Final = (
    (re.compile(r"^otel-limits (quotas|kill)\b"), STORE),
    (re.compile(r"^otel-limits .*--prometheus http"), PROMETHEUS),
    (re.compile(r"^otel-limits top\b(?!.*--prometheus)"), ENDPOINTS[0]),
)
"""What a command needs a server for: where there is none, it is only looked whether it is right."""
LIVE: Final = re.compile(r"^otel-limits (top\b(?!.*--once)|quotas .*--watch)")
"""Commands that go on until somebody presses Ctrl-C in their terminal."""
SIGHT: Final = re.compile(r"researcher|\{")
"""What is seen of them: an agent of an endpoint, or a document about a quota."""
PARSED: Final = re.compile(
    r"^otel-limits (autoload\b|dashboards preview)"
    r"|run .*-- (gunicorn|celery|uvicorn|python -m )|OTEL_EXPORTER_OTLP"
)
"""Commands that need a server that somebody else wrote, minutes, or an environment of their own:
it is looked whether they are right. Their own tests run them."""


LEDGER: Final = "otel-limits/ledger.db"
"""Where commands look for the user's own ledger, below `XDG_DATA_HOME`."""
EXAMPLES: Final = {
    "TRACE_ID": "46c92cc11afc5aea4e7604fc9686e247",
    "CORRUPT": LEDGER,
    "LEDGER": LEDGER,
    "FILE": "ledger-0.spill-1-0.jsonl",
}
"""What stands for a placeholder: a trace of the example ledger, that ledger, and a spill file."""
SPAN: Final = {
    "traceId": "5b8efff798038103d269b633813fc60c",
    "spanId": "eee19b7ec3c1b174",
    "name": "chat",
    "startTimeUnixNano": "1795420700000000000",
    "endTimeUnixNano": "1795420701000000000",
    "attributes": attributes({"gen_ai.operation.name": "chat", "gen_ai.usage.input_tokens": 9}),
}
"""A model call that somebody else recorded."""
GIVEN: Final = {
    "app.py": PROGRAM,
    EXAMPLES["FILE"]: '{"otel_limits_ledger": "/gone/ledger.db"}\n',
    "spans.jsonl": json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [SPAN]}]}]}),
}
"""Files that a page takes for granted."""


@dataclass(frozen=True)
class Command:
    """A command of a page."""

    text: str
    shown: str | None
    """What the page says that it prints; `None` where it says nothing."""
    start: int = 0
    """Where that stands in the page."""
    end: int = 0

    @property
    def words(self) -> list[str]:
        """Its words, without a comment."""
        words = shlex.split(self.text, comments=True)
        return [EXAMPLES.get(word, word) for word in words]


def commands(block: str, at: int) -> Iterator[Command]:
    """Read a session that stands at a place of a page."""
    if not re.search(r"^\$ ", block, re.MULTILINE):
        for line in block.splitlines():
            if line.strip() and not line.startswith("#"):
                yield Command(line, None)
        return
    for found in re.finditer(r"^\$ (.*\n)((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
        yield Command(found[1].strip(), found[2], at + found.start(2), at + found.end(2))


@dataclass
class Session:
    """Where the commands of a page are run: a directory, and variables."""

    directory: Path
    variables: dict[str, str] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    """The addresses of servers that a test has, by those of the pages."""

    def run(self, command: Command) -> str | None:
        """Run a command as a shell would.

        Returns:
            What it printed; `None` for one that is not run here.

        Raises:
            AssertionError: It is not one, or it failed.
        """
        words, target = redirected(command.words)
        given = [word for word in words if re.match(r"[A-Z_][A-Z0-9_]*=", word)]
        if words[0] == "export":
            self.variables |= dict(self._placed(word).split("=", 1) for word in words[1:])
            return ""
        rest = words[len(given) :] if words[: len(given)] == given else words
        if rest[0] in FOREIGN:
            return None
        if rest[0] == "cat":
            return self._told((self.directory / rest[1]).read_text(encoding="utf-8"))
        assert rest[0] == "otel-limits", f"nobody knows how to run {command.text}"
        variables = self.variables | dict(word.split("=", 1) for word in given)
        printed = self._of_ours([self._placed(word) for word in rest], command, variables, target)
        if printed is None:
            return None
        if target:
            (self.directory / target).write_text(printed, encoding="utf-8")
            return ""
        return self._told(printed)

    def _of_ours(
        self, words: list[str], command: Command, variables: Mapping[str, str], target: str | None
    ) -> str | None:
        if not self._can_run(command):
            make_parser().parse_args([word for word in words[1:] if word != "..."])
            return None
        if LIVE.search(command.text):
            return self._look(words, variables)
        if words[1] in IN_A_PROCESS and "--record" not in words:
            return self._start(words, variables, may_fail=command.shown is not None)
        allowed = {0, 1} if "exit status 1" in command.text else {0}
        return self._call(words, variables, is_file=target is not None, allowed=allowed)

    def _told(self, printed: str) -> str:
        printed = printed.replace(str(self.directory), HOME)
        return printed.replace(str(Path(sys.executable).parent), "/usr/bin")

    def _placed(self, word: str) -> str:
        for there, here in self.places.items():
            word = word.replace(there, here)
        return word

    def _can_run(self, command: Command) -> bool:
        needed = {place for pattern, place in NEEDED if pattern.search(command.text)}
        return needed <= self.places.keys() and not PARSED.search(command.text)

    def _look(self, words: list[str], variables: Mapping[str, str]) -> str:
        """Run a command in a terminal until there is something to see, and leave it."""
        with within(self.directory), patch.dict(os.environ, variables):
            terminal = Terminal((sys.executable, "-m", "otel_limits.cli", *words[1:]))
        try:
            terminal.until(lambda _: SIGHT.search(terminal.output), "something to see")
            terminal.press("\x03")
            assert terminal.end() == 0, terminal.output
        finally:
            terminal.close()
        return terminal.output

    def _call(
        self, words: list[str], variables: Mapping[str, str], *, is_file: bool, allowed: set[int]
    ) -> str:
        """Run a command in this process; what goes to a file is not made for a terminal."""
        screen = Screen()
        screen.is_terminal = not is_file
        with (
            within(self.directory),
            patch.dict(os.environ, {**TERMINAL, **variables}),
            patch("time.time", lambda: NOW),
            contextlib.redirect_stdout(screen),
            # As in a shell: only standard output goes to a file.
            contextlib.redirect_stderr(io.StringIO() if is_file else Beside(screen)),
        ):
            try:
                status = main(words[1:])
            except SystemExit as ended:  # of the parser
                status = ended.code if isinstance(ended.code, int) else 1
        assert status in allowed, screen.getvalue()
        return screen.getvalue()

    def _start(self, words: list[str], variables: Mapping[str, str], *, may_fail: bool) -> str:
        """Run a command in a process of its own; where its output is shown, so is its failure."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            words,
            cwd=self.directory,
            env={**os.environ, **TERMINAL, "PATH": path, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert may_fail or done.returncode == 0, done.stdout[-2_000:]
        return done.stdout


@contextlib.contextmanager
def within(directory: Path) -> Iterator[None]:
    """Be in a directory."""
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


class Screen(io.StringIO):
    """What a command takes for a terminal, unless it is a file."""

    is_terminal = True

    def isatty(self) -> bool:
        """Say so."""
        return self.is_terminal


class Beside(io.TextIOBase):
    """Standard error, which goes to the same screen; without progress bars."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def write(self, text: str) -> int:
        """Write to the screen."""
        return self._screen.write(text)


def redirected(words: list[str]) -> tuple[list[str], str | None]:
    """Tell a command from the file that it is to write."""
    if ">" not in words:
        return words, None
    return words[: words.index(">")], words[-1]


def sessions(path: Path) -> Iterator[Command]:
    """Every command of a page, in order."""
    for found in BLOCK.finditer(path.read_text(encoding="utf-8")):
        if found[1] == "console":
            yield from commands(found[2], found.start(2))


def files(path: Path) -> dict[str, str]:
    """The files that a page shows, by name."""
    found = BLOCK.findall(path.read_text(encoding="utf-8"))
    named = [(FILE.match(body), body) for _, body in found]
    return {name[1]: body for name, body in named if name}


def prepared(path: Path, directory: Path, places: Mapping[str, str]) -> Session:
    """Begin a session with the files of a page, and the example ledger where one is asked."""
    for name, body in {**GIVEN, **files(path)}.items():
        (make((directory / name).parent) / Path(name).name).write_text(body, encoding="utf-8")
    asked = [command.text for command in sessions(path)]
    if any(re.match("otel-limits (audit|ledger) ", text) for text in asked):
        record.write(make((directory / LEDGER).parent) / "ledger.db", date(2026, 11, 23))
    return Session(directory, {"XDG_DATA_HOME": str(directory)}, places)


def make(directory: Path) -> Path:
    """Make a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def is_shown(shown: str, printed: str) -> bool:
    """Tell whether an output is the one that a page shows."""
    pattern = re.escape(steady(shown)).replace(re.escape(LEFT_OUT), ".*")
    return re.fullmatch(pattern, steady(printed)) is not None


def steady(text: str) -> str:
    """What of an output has to be the same: its words, without what differs between machines."""
    for pattern, instead in UNSTEADY:
        text = pattern.sub(instead, text)
    # Lines are folded otherwise where a path is longer.
    return " ".join(text.split())


def written(path: Path, directory: Path, places: Mapping[str, str] | None = None) -> str:
    """Put what the commands of a page print where it says so, unless that is the same."""
    text, shift = path.read_text(encoding="utf-8"), 0
    session = prepared(path, directory, places or {})
    for command in sessions(path):
        printed = session.run(command)
        if command.shown is None or printed is None or is_shown(command.shown, printed):
            continue
        lines = "".join(f"{line.rstrip()}\n" for line in printed.rstrip().splitlines())
        start, end = command.start + shift, command.end + shift
        text = text[:start] + lines + text[end:]
        shift += len(lines) - (end - start)
    return text


if __name__ == "__main__":
    for page in EVERY:
        with tempfile.TemporaryDirectory() as made:
            page.write_text(written(page, Path(os.path.realpath(made))), encoding="utf-8")
