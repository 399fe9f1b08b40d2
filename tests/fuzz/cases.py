"""One case for each number: garbage for a parser, and what must be true whatever it was."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from strands import Agent, tool

from otel_limits import disable
from otel_limits.audit.bills.bill_reading import read_bills
from otel_limits.cli import main
from otel_limits.core.errors import LedgerError
from otel_limits.runtime.enable import enable_leniently
from otel_limits.runtime.runtime import RUNTIME
from otel_limits.settings.settings_reader import read_settings
from otel_limits.settings.table import SETTINGS
from otel_limits.testing import ScriptedModel, says, uses
from tests.fuzz import garbage
from tests.ledger.bills import BILLS, THIRD, BilledCall

if TYPE_CHECKING:
    from otel_limits.runtime.guard import Source

CAP = 3
MOST_CALLS = 9
SECRET = "u:hunter2@"  # noqa: S105  appears in the garbage
OWN = frozenset({"MAX_TURNS", "DISABLED", "STRICT", "PROMETHEUS_PORT", "POLICY"})
"""Settings that a case sets itself, or that would open a port."""

VARIABLES = [
    setting.variable
    for setting in SETTINGS
    if setting.variable.removeprefix("OTEL_LIMITS_") not in OWN
]

PARTIES = ("otel_limits", "strands", "tests")
"""Modules whose code may raise an agent's final exception."""

POLICY = """\
defaults: {limits: {max_tool_calls: 90, max_cost_usd: 5}, unpriced_calls: warn}
agents:
  "research*": {limits: {max_token_budget: 1000}}
models: {known: {price: {input: 1, output: 2}}}
quotas: {team: {limits: {max_cost_usd: 5}, per: 1h, by: [agent]}}
"""

COMMANDS = (
    *(("run",), ("check",), ("docs",), ("quotas",), ("audit", "spend"), ("audit", "stops")),
    *(("audit", "show"), ("audit", "verify"), ("ledger", "import"), ("autoload", "status"), ()),
)


class RefusedError(BaseException):
    """The process ended with sentences."""


def refuse(sentences: Sequence[str]) -> None:
    """Stands in for the end of the process."""
    assert sentences
    assert all(sentence.strip() for sentence in sentences)
    raise RefusedError


@tool
def search() -> str:
    """Search."""
    return "nothing found"


class GarbageModel(ScriptedModel):
    """Streams garbage."""

    def __init__(self, random: Random) -> None:
        """Take the source of it."""
        super().__init__([])
        self.random = random

    async def stream(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        """Stream some; without a limit, the agent eventually finishes."""
        self.calls += 1
        for event in garbage.events(self.random) if self.calls <= MOST_CALLS else ():
            yield event


def environment(random: Random, place: Path) -> None:
    """Variables of otel-limits with any values: a valid cap among them holds."""
    names = random.sample(VARIABLES, random.randint(1, 4))
    settings = {name: garbage.text(random) for name in names}
    if random.random() < 0.3:
        settings["OTEL_LIMITS_STRICT"] = "true"
    limited(settings, place)


def policy(random: Random, place: Path) -> None:
    """A policy file that was damaged: what the environment sets is in force."""
    path = place / "policy.yaml"
    path.write_bytes(garbage.mutated(random, POLICY).encode("utf-8", "surrogateescape"))
    limited({"OTEL_LIMITS_POLICY": str(path)}, place)


def stores(random: Random, place: Path) -> None:
    """Addresses of a ledger and a quota store: neither is needed to halt."""
    sound = ("redis://u:hunter2@127.0.0.1:1/0", "sqlite:///ledger.db", "unix://redis.sock")
    names = ("OTEL_LIMITS_LEDGER", "OTEL_LIMITS_QUOTA_STORE")
    limited({name: garbage.mutated(random, random.choice(sound)) for name in names}, place)


def chunks(random: Random, place: Path) -> None:
    """A model's stream: each request counts, whatever comes of it."""
    limited({}, place, GarbageModel(random))


def command_line(random: Random, place: Path) -> None:
    """Any arguments: a status, and never a traceback. The replaced process has the cap."""
    words = [garbage.text(random).replace("\x00", "") for _ in range(random.randint(0, 3))]
    words += random.sample(("--max-turns", "--json", "--since", "--by", "-x", "--where", "--"), 2)
    random.shuffle(words)
    command = random.choice(COMMANDS)
    capped = ("--max-turns", str(CAP)) if command == ("run",) else ()
    programs: list[Mapping[str, str]] = []

    def start(_: object, environ: Mapping[str, str]) -> tuple[int, str]:
        """Stand in for the program that would replace this process."""
        programs.append(environ)
        return 127, "not started"

    with surroundings({}, place), patch("otel_limits.cli.run_command.replace_process", start):
        errors = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            try:
                status = main([*command, *capped, *words])
            except SystemExit as ending:
                status = int(ending.code or 0)
        assert status in range(256), status
        assert status == 0 or errors.getvalue() or status == 1
        assert_readable(errors.getvalue())
    for environ in programs:
        limited(ours(environ), place, source="run")


def bills(random: Random, place: Path) -> None:
    """An export that was damaged: it is read, or rejected with a sentence."""
    calls = [BilledCall(at=THIRD + n * 9_000, input=n, output=2) for n in range(9)]
    files = []
    for number, text in enumerate(random.choice(list(BILLS.values()))(calls)):
        files.append(place / f"bill-{number}")
        files[-1].write_bytes(garbage.mutated(random, text).encode("utf-8", "surrogateescape"))
    with contextlib.suppress(LedgerError):
        read_bills(files)


def ours(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are settings."""
    return {name: text for name, text in environ.items() if name.startswith("OTEL_LIMITS_")}


CASES: dict[str, Callable[[Random, Path], None]] = {
    case.__name__: case for case in (environment, policy, stores, chunks, bills, command_line)
}


@contextlib.contextmanager
def surroundings(settings: dict[str, str], place: Path) -> Any:
    """Set variables, without those that no process can have, in a directory that may be filled."""
    possible = {name: text.replace("\x00", "") for name, text in settings.items()}
    kept = {name: text for name, text in os.environ.items() if not name.startswith("OTEL_")}
    before = Path.cwd()
    os.chdir(place)
    try:
        with patch.dict(os.environ, {**kept, **possible}, clear=True):
            yield
    finally:
        os.chdir(before)


def limited(
    settings: dict[str, str],
    place: Path,
    model: ScriptedModel | None = None,
    source: Source = "code",
) -> None:
    """Make sure that an agent is halted at its cap, or that the process refused to start.

    Neither may anything have raised while it was switched on: it is reported in a message, and what
    came after it was not done.
    """
    model = model or ScriptedModel([*[uses("search")] * MOST_CALLS, says("nothing")])
    settings = {"OTEL_LIMITS_MAX_TURNS": str(CAP), **settings}
    cap = read_settings(settings).settings.policy.limits.max_turns
    assert cap is not None
    obstacles: tuple[str, ...] = ()
    with (
        surroundings(settings, place),
        patch("otel_limits.runtime.enable.end_process", refuse),
        readable_log(),
    ):
        try:
            enable_leniently(source)
            obstacles = RUNTIME.enforcement().obstacles
            call(Agent(model=model, tools=[search], callback_handler=None))
        except RefusedError:
            return
        finally:
            disable()
    assert model.calls <= cap, f"{model.calls} calls at a cap of {cap}"
    assert obstacles == ()


def call(agent: Agent) -> None:
    """Call it; what the framework makes of garbage is its own, what we raise is not."""
    try:
        agent("go")
    except Exception as error:  # noqa: BLE001  whatever garbage leads to
        cause = error.__cause__ or error
        files = [frame.filename for frame in traceback.extract_tb(cause.__traceback__)]
        # The standard library raises for its caller.
        parties = [each for each in files if any(f"/{name}/" in each for name in PARTIES)]
        assert "/otel_limits/" not in parties[-1], f"{cause!r} comes from {parties[-1]}"


@contextlib.contextmanager
def readable_log() -> Iterator[None]:
    """Check that every log record is a complete sentence."""
    said: list[str] = []
    handler = logging.Handler(logging.DEBUG)
    handler.setFormatter(logging.Formatter())  # with the traceback, where there is one
    handler.emit = lambda record: said.append(handler.format(record))  # type: ignore[method-assign]
    logger = logging.getLogger("otel_limits")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)  # whatever the runner of the tests is shown
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
    assert_readable("\n".join(said))


def assert_readable(text: str) -> None:
    """Output that the user sees has neither a traceback nor a secret."""
    assert "Traceback" not in text, text
    assert SECRET not in text, text
