"""Runs the commands of the README and the pages, and updates the outputs that they show.

A `console` block is a session: a line that starts with `$ ` is a command, followed by its output. A
block without any `$ ` has one command per line and shows no output. The commands of a page run in
order, in one directory, at one moment (`NOW`), on a terminal of 100 columns without colors.
`VOLATILE` replaces text that differs between machines, and `[...]` matches any omitted output.

A block whose first line is a comment with a file name, such as `# app.py`, is that file.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import secrets
import shlex
import shutil
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
from otel_limits.demo import sample_fleet
from tests.launching import WITHOUT_LANGCHAIN
from tests.ledger.bills import openai, paid, used
from tests.ledger.otlp import attributes
from tests.paths import ROOT
from tests.processes import PATIENCE_SECONDS
from tests.programs.cli.test_live import Terminal
from tests.readme import PAGES, README

INSTALLED: Final = re.compile(r"pip install '(\.|otel-limits)(?=\[)")
"""A command that installs otel-limits, from a checkout or from an index, up to its extras."""

EVERY: Final = (README, *PAGES, ROOT / "dashboards/README.md", ROOT / ".github/CONTRIBUTING.md")
NOW: Final = 1_795_420_800.0
"""2026-11-23 08:00:00 UTC, a Monday, for what is run in this process."""
LEFT_OUT: Final = "[...]"
"""Marks omitted output in the pages."""
HOME: Final = "/srv/agents"
"""The directory of the commands, as the pages show it."""

TERMINAL: Final = {"TERM": "dumb", "COLUMNS": "100", "LINES": "50"}
BLOCK: Final = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE: Final = re.compile(r"# ([\w./-]+\.\w+)\n")
BORROWED: Final = "`app.py` is the example for [Strands](strands.md)"
"""A page that says so uses the file of that page: its commands suit every framework."""
PROGRAM: Final = """\
from strands import Agent
from otel_limits.testing import ScriptedModel, says
Agent(model=ScriptedModel([says("done")]), callback_handler=None)("go")
"""
"""The program of a page that shows none."""
VOLATILE: Final = (
    (re.compile(r"\b127\.0\.0\.1:\d+"), "127.0.0.1:PORT"),
    (re.compile(r"\b\d+\.\d s\b"), "0.0 s"),
    (re.compile(r"strands-agents \d+(\.\d+)+"), "strands-agents VERSION"),
    (re.compile(r"langgraph \d+(\.\d+)+"), "langgraph VERSION"),
    (re.compile(r"openai-agents \d+(\.\d+)+"), "openai-agents VERSION"),
    (re.compile(r"genai-prices \d+(\.\d+)+ of \d{4}-\d\d-\d\d"), "genai-prices VERSION of DATE"),
    (re.compile(r"/usr/bin/python[\d.]*"), "/usr/bin/python"),
    (re.compile(r"pip install (-e )?'[^'\[]*"), "pip install 'PLACE"),
)
"""Ports, durations, versions, and paths of Python and of the checkout, which comparisons ignore."""

SUBPROCESS_COMMANDS: Final = frozenset({"run", "doctor", "autoload", "demo"})
"""Commands that replace or start a process."""
THIRD_PARTY: Final = frozenset(
    {"pip", "docker", "kubectl", "pytest", "ruff", "python", "opentelemetry-instrument"}
    | {"ACL", ".ci/run", ".ci/nightly", "gunicorn", "uvicorn", "celery", "sam", "aws", "jupyter"}
    | {"pg_dump", "pg_restore", "sqlite3", "mkdir", "mv", "umask"}
)
"""Third-party programs and Redis commands. Other tests run them where possible."""
STORE: Final = "redis://localhost:6379/0"
PROMETHEUS: Final = "http://localhost:9090"
ENDPOINTS: Final = ("worker-1:9464", "worker-2:9464")
"""Server addresses in the pages. A test with servers maps them to its own."""
NEEDED: Final = (
    (re.compile(r"^otel-limits (quotas|kill)\b"), STORE),
    (re.compile(r"^otel-limits .*--prometheus http"), PROMETHEUS),
    (re.compile(r"^otel-limits top\b(?!.*--prometheus)"), ENDPOINTS[0]),
)
"""Commands that need a server. Without one, they are only parsed."""
LIVE: Final = re.compile(r"^otel-limits (top\b(?!.*--once)|quotas .*--watch)")
"""Commands that run until Ctrl-C."""
VISIBLE: Final = re.compile(r"researcher|\{")
"""Output that shows they work: an agent of an endpoint, or a JSON document about a quota."""
PARSE_ONLY: Final = re.compile(
    r"^otel-limits (autoload\b|ledger (accept|merge))"
    r"|run .*-- (gunicorn|celery|uvicorn|python -m )|OTEL_EXPORTER_OTLP"
)
"""Commands that need a third-party server, minutes, or a separate environment. They are only parsed
here; other tests run them."""


LEDGER: Final = "otel-limits/ledger.db"
"""The default ledger, below `XDG_DATA_HOME`."""
EXAMPLES: Final = {
    "TRACE_ID": "46c92cc11afc5aea4e7604fc9686e247",
    "LEDGER": LEDGER,
    "FILE": "ledger-0.spill-1-0.jsonl",
}
"""Values of placeholders: a trace of the example ledger, the ledger, and a spill file."""
SPAN: Final = {
    "traceId": "5b8efff798038103d269b633813fc60c",
    "spanId": "eee19b7ec3c1b174",
    "name": "chat",
    "startTimeUnixNano": "1795420700000000000",
    "endTimeUnixNano": "1795420701000000000",
    "attributes": attributes({"gen_ai.operation.name": "chat", "gen_ai.usage.input_tokens": 9}),
}
"""A model call recorded by another tool."""
PROVIDED_FILES: Final = {
    "app.py": PROGRAM,
    EXAMPLES["FILE"]: '{"otel_limits_ledger": "/gone/ledger.db"}\n',
    "quotas.yaml": (ROOT / "tests/ledger/quotas.yaml").read_text(encoding="utf-8"),
    "usage.json": openai(used(model="gpt-4o")),
    "costs.json": openai(paid("0.06", line_item="gpt-4o, input")),
    "spans.jsonl": json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [SPAN]}]}]}),
}
"""Files that pages assume exist."""


@dataclass(frozen=True)
class Command:
    """A command of a page."""

    text: str
    shown: str | None
    """The output on the page; `None` if the page shows no output."""
    start: int = 0
    """Position of the output in the page."""
    end: int = 0

    @property
    def words(self) -> list[str]:
        """The arguments, without comments."""
        words = shlex.split(self.text, comments=True)
        return [EXAMPLES.get(word, word) for word in words]


def commands(block: str, at: int) -> Iterator[Command]:
    """Parse a session that starts at a position of the page."""
    if not re.search(r"^\$ ", block, re.MULTILINE):
        for line in block.splitlines():
            if line.strip() and not line.startswith("#"):
                yield Command(line, None)
        return
    for found in re.finditer(r"^\$ (.*\n)((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
        yield Command(found[1].strip(), found[2], at + found.start(2), at + found.end(2))


@dataclass
class Session:
    """The directory and environment of a page's commands."""

    directory: Path
    variables: dict[str, str] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    """Server addresses of the test, by those in the pages."""

    def run(self, command: Command) -> str | None:
        """Run a command as a shell would.

        Returns:
            The output; `None` if the command is not run here.

        Raises:
            AssertionError: The command is unknown, or it failed.
        """
        words, target = split_redirection(command.words)
        given = [word for word in words if re.match(r"[A-Z_][A-Z0-9_]*=", word)]
        if words[0] == "export":
            self.variables |= dict(self._resolve_address(word).split("=", 1) for word in words[1:])
            return ""
        rest = words[len(given) :] if words[: len(given)] == given else words
        if rest[0] in THIRD_PARTY:
            return None
        if rest[0] == "cat":
            return self._normalize_paths((self.directory / rest[1]).read_text(encoding="utf-8"))
        assert rest[0] == "otel-limits", f"unknown command: {command.text}"
        variables = self.variables | dict(word.split("=", 1) for word in given)
        printed = self._run_own(
            [self._resolve_address(word) for word in rest], command, variables, target
        )
        if printed is None:
            return None
        if target:
            (self.directory / target).write_text(printed, encoding="utf-8")
            return ""
        return self._normalize_paths(printed)

    def _run_own(
        self, words: list[str], command: Command, variables: Mapping[str, str], target: str | None
    ) -> str | None:
        if not self._can_run(command):
            make_parser().parse_args([word for word in words[1:] if word != "..."])
            return None
        if LIVE.search(command.text):
            return self._run_in_terminal(words, variables)
        if words[1] in SUBPROCESS_COMMANDS and "--record" not in words:
            return self._run_in_subprocess(words, variables, may_fail=command.shown is not None)
        allowed = {0, 1} if "exit status 1" in command.text else {0}
        return self._run_in_process(words, variables, is_file=target is not None, allowed=allowed)

    def _normalize_paths(self, printed: str) -> str:
        printed = printed.replace(str(self.directory), HOME)
        return printed.replace(str(Path(sys.executable).parent), "/usr/bin")

    def _resolve_address(self, word: str) -> str:
        for there, here in self.places.items():
            word = word.replace(there, here)
        return word

    def _can_run(self, command: Command) -> bool:
        needed = {place for pattern, place in NEEDED if pattern.search(command.text)}
        return needed <= self.places.keys() and not PARSE_ONLY.search(command.text)

    def _run_in_terminal(self, words: list[str], variables: Mapping[str, str]) -> str:
        """Run a command in a terminal, wait for its first output and interrupt it."""
        with within(self.directory), patch.dict(os.environ, variables):
            terminal = Terminal((sys.executable, "-m", "otel_limits.cli", *words[1:]))
        try:
            terminal.until(lambda _: VISIBLE.search(terminal.output), "visible output")
            terminal.press("\x03")
            assert terminal.end() == 0, terminal.output
        finally:
            terminal.close()
        return terminal.output

    def _run_in_process(
        self, words: list[str], variables: Mapping[str, str], *, is_file: bool, allowed: set[int]
    ) -> str:
        """Run a command in this process. Output to a file is not formatted for a terminal."""
        screen = Screen()
        screen.is_terminal = not is_file
        with (
            within(self.directory),
            patch.dict(os.environ, {**TERMINAL, **variables}),
            patch("time.time", lambda: NOW),
            contextlib.redirect_stdout(screen),
            # As in a shell, `>` redirects only standard output.
            contextlib.redirect_stderr(io.StringIO() if is_file else SharedStderr(screen)),
        ):
            try:
                status = main(words[1:])
            except SystemExit as ended:  # raised by the parser
                status = ended.code if isinstance(ended.code, int) else 1
        assert status in allowed, screen.getvalue()
        return screen.getvalue()

    def _run_in_subprocess(
        self, words: list[str], variables: Mapping[str, str], *, may_fail: bool
    ) -> str:
        """Run a command in a subprocess. It may fail if the page shows its output."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            words,
            cwd=self.directory,
            env={**os.environ, **TERMINAL, **WITHOUT_LANGCHAIN, "PATH": path, **variables},
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
    """Change the working directory for a block."""
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


class Screen(io.StringIO):
    """Standard output that claims to be a terminal, unless redirected to a file."""

    is_terminal = True

    def isatty(self) -> bool:
        """Return whether it claims to be a terminal."""
        return self.is_terminal


class SharedStderr(io.TextIOBase):
    """Standard error that shares the screen and shows no progress bars."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def write(self, text: str) -> int:
        """Write to the screen."""
        return self._screen.write(text)


def split_redirection(words: list[str]) -> tuple[list[str], str | None]:
    """Return a command and the file its output is redirected to, if any."""
    if ">" not in words:
        return words, None
    return words[: words.index(">")], words[-1]


def sessions(path: Path) -> Iterator[Command]:
    """Yield the commands of a page in order."""
    for found in BLOCK.finditer(path.read_text(encoding="utf-8")):
        if found[1] == "console":
            yield from commands(found[2], found.start(2))


def files(path: Path) -> dict[str, str]:
    """Return the files that a page shows or borrows, by name."""
    text = path.read_text(encoding="utf-8")
    named = [(FILE.match(body), body) for _, body in BLOCK.findall(text)]
    shown = {name[1]: body for name, body in named if name}
    return files(path.with_name("strands.md")) | shown if BORROWED in text else shown


def start_session(path: Path, directory: Path, places: Mapping[str, str]) -> Session:
    """Start a session with the files of a page, and the example ledger if a command queries one."""
    for name, body in {**PROVIDED_FILES, **files(path)}.items():
        (make((directory / name).parent) / Path(name).name).write_text(body, encoding="utf-8")
    texts = [command.text for command in sessions(path)]
    if any(re.match("otel-limits (audit|ledger) ", text) for text in texts):
        sample_fleet.write_ledger(
            make((directory / LEDGER).parent) / "ledger.db", date(2026, 11, 23)
        )
    return Session(directory, {"XDG_DATA_HOME": str(directory)}, places)


def make(directory: Path) -> Path:
    """Create a directory and its parents, and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def matches(shown: str, printed: str) -> bool:
    """Return whether a command printed the output that its page shows."""
    pattern = re.escape(stable_text(shown)).replace(re.escape(LEFT_OUT), ".*")
    return re.fullmatch(pattern, stable_text(printed)) is not None


def stable_text(text: str) -> str:
    """Return the words of an output without text that differs between machines."""
    for pattern, instead in VOLATILE:
        text = pattern.sub(instead, text)
    # Whitespace is ignored, because a longer path wraps elsewhere.
    return " ".join(text.split())


def with_outputs(path: Path, directory: Path, places: Mapping[str, str] | None = None) -> str:
    """Return a page with changed outputs replaced by what its commands print now."""
    text, shift = path.read_text(encoding="utf-8"), 0
    session = start_session(path, directory, places or {})
    for command in sessions(path):
        printed = session.run(command)
        if command.shown is None or printed is None or matches(command.shown, printed):
            continue
        lines = "".join(f"{line.rstrip()}\n" for line in printed.rstrip().splitlines())
        start, end = command.start + shift, command.end + shift
        text = text[:start] + lines + text[end:]
        shift += len(lines) - (end - start)
    return text


@contextlib.contextmanager
def home() -> Iterator[Path]:
    """Make a directory whose path is as long as `HOME`: paths set the widths of tables."""
    directory = Path("/tmp", secrets.token_hex(3))  # noqa: S108  private by its mode
    directory.mkdir(mode=0o700)
    try:
        yield directory.resolve()  # on macOS, /tmp is a symbolic link
    finally:
        shutil.rmtree(directory)


def write() -> None:
    """Update the outputs on all pages."""
    for page in EVERY:
        with home() as directory:
            page.write_text(with_outputs(page, directory), encoding="utf-8")


def run_installed(page: Path, environment: Path, wheel: Path) -> None:
    """Run the commands of a page in another environment, installing a wheel as it says.

    Raises:
        AssertionError: A command failed, or its first line of output differs from the page's.
    """
    with tempfile.TemporaryDirectory() as directory:
        session = start_session(page, Path(directory), {})
        path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
        variables = {**os.environ, **TERMINAL, **session.variables, "PATH": path}
        for command in sessions(page):
            if command.words[0] == "export":
                variables |= dict(word.split("=", 1) for word in command.words[1:])
                continue
            text = INSTALLED.sub(f"pip install --quiet '{wheel}", command.text)
            done = subprocess.run(
                ["bash", "-euc", text],
                cwd=directory,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            first = (command.shown or "").partition("\n")[0].removesuffix(LEFT_OUT)
            is_as_shown = done.returncode == 0 and done.stdout.startswith(first)
            assert is_as_shown, f"{text}\n{done.stdout}"


if __name__ == "__main__":
    docs = ROOT / "otel_limits/docs"
    for each in (README, docs / "langchain.md", docs / "openai-agents.md"):
        run_installed(each, Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
