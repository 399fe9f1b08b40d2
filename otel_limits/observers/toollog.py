"""Keeps what tools were asked and what they answered, for post-mortems, where a user wants it.

This is the only place of ours that keeps contents: events never carry them, so that whoever sees a
tool's result writes it here directly. Each process appends to a file of its own, one JSON object
per line, readable by its owner alone.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_type_hints

from otel_limits.core.internal_errors import INTERNAL_ERRORS, LOG_INTERVAL_SECONDS, suppress_errors
from otel_limits.core.secrets import redact_url
from otel_limits.core.values import WHOLE_NUMBER

if TYPE_CHECKING:
    from otel_limits.core.events import Invocation

logger = logging.getLogger("otel_limits")

COMPONENT: Final = "tool_log"

CHARACTERS: Final = 2_000
"""What is kept of arguments and of a result, from their beginning."""

FILES: Final = "tools-*.ndjson"

MAX_LINE_BYTES: Final = 1_000_000
"""No line of ours is longer; the rest of one is read as a line of its own."""

NO_FOLLOW: Final[int] = getattr(os, "O_NOFOLLOW", 0)
"""A link that was put in the place of a file is not followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedCall:
    """One tool call with its contents."""

    time: datetime
    """When it was written, in UTC."""
    agent: str
    invocation_id: str
    trace_id: str | None
    number: int
    """1 for the first tool call of the invocation, in the order of the requests."""
    tool: str
    arguments: str
    """The first 2,000 characters of the arguments, as JSON."""
    result: str
    """The first 2,000 characters of the result."""
    trigger: bool
    """True when this call caused the halt."""


TYPES: Final[dict[str, Any]] = get_type_hints(LoggedCall) | {"time": str}
"""The names of an entry in its line of JSON, with the types of their values there."""


class ToolLog:
    """Appends every n-th tool call, and each one that caused a halt, to this process' file.

    The file is opened for each entry: nothing is held that a fork, a rotation or a daemon that
    closes its files could turn against it. A write that fails is counted, told in a warning at
    most once a minute, and never felt by the agent.

    Attributes:
        failed: Entries that could not be written.
    """

    def __init__(
        self, directory: Path, interval: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Write nothing yet.

        Args:
            directory: Where the files go; made with the first entry.
            interval: Of every so many tool calls of an invocation, the last is written.
            clock: Seconds, for the time between two warnings.

        Raises:
            ValueError: `interval` is below 1.
        """
        self.failed = 0
        self._directory = directory
        self._interval = WHOLE_NUMBER.of_value("interval", interval)
        self._clock = clock
        self._warned = -LOG_INTERVAL_SECONDS
        # Beside the process id, which the system gives again: containers tend to be process
        # 1 each time.
        self._id = uuid.uuid4().hex[:8]
        self._torn = False

    @property
    def path(self) -> Path:
        """The file of this process: another one after a fork."""
        return self._directory / FILES.replace("*", f"{os.getpid()}-{self._id}")

    @suppress_errors(COMPONENT)
    def write(
        self,
        invocation: Invocation,
        number: int,
        tool: str,
        arguments: object,
        result_text: str,
        *,
        trigger: bool,
    ) -> None:
        """Write one finished tool call, if it is one to be written.

        Args:
            invocation: Whose call it was.
            number: 1 for the first tool call of the invocation.
            tool: Name of the tool.
            arguments: What the model asked it, as JSON values.
            result_text: What it answered.
            trigger: It caused the halt, so that it is written whatever its number.
        """
        # The call that caused the halt is the one that a post-mortem begins with.
        if not trigger and number % self._interval:
            return
        entry = LoggedCall(
            time=datetime.now(timezone.utc),
            agent=invocation.agent,
            invocation_id=invocation.id,
            trace_id=invocation.trace_id,
            number=number,
            tool=tool,
            arguments=_text(arguments)[:CHARACTERS],
            result=result_text[:CHARACTERS],
            trigger=trigger,
        )
        try:
            self._append(_line(entry))
        except OSError as error:
            self._fail(error)

    def _append(self, line: bytes) -> None:
        """Add a line in one piece, after the end of one that a full disk cut short."""
        # At each entry: whoever cleans up may have deleted the directory meanwhile.
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileIO(self.path, "ab", opener=_open_private) as file:
            line = b"\n" + line if self._torn else line
            written = file.write(line)
        # A full disk may take a part of a line and raise nothing.
        self._torn = written != len(line)
        if self._torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _fail(self, error: OSError) -> None:
        self.failed += 1
        INTERNAL_ERRORS.publish(COMPONENT)
        now = self._clock()
        if now - self._warned < LOG_INTERVAL_SECONDS:
            return
        self._warned = now
        logger.warning(
            "otel-limits: the tool log could not be written to %s: %s. The agent goes on without "
            "it; %d entries are lost so far.",
            redact_url(str(self._directory)),
            error.strerror,
            self.failed,
        )


def _open_private(path: str, flags: int) -> int:
    # For the owner alone, from the moment in which it is made: arguments may be anything.
    return os.open(path, flags | NO_FOLLOW, 0o600)


def _text(arguments: object) -> str:
    try:
        return json.dumps(arguments, ensure_ascii=False, default=str)
    except (TypeError, ValueError):  # keys or a circle that JSON does not have
        return repr(arguments)


def _line(entry: LoggedCall) -> bytes:
    """Write an entry as one line; half a character becomes the escape that JSON has for it."""
    values = {name: getattr(entry, name) for name in TYPES}
    values["time"] = entry.time.isoformat()
    return json.dumps(values, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


class Entries:
    """The entries of every process in a directory, file by file, each in its order.

    Attributes:
        skipped: Malformed lines met so far, as a process that was killed leaves them.
    """

    def __init__(self, directory: Path) -> None:
        """Read nothing yet."""
        self.skipped = 0
        self._directory = directory

    def __iter__(self) -> Iterator[LoggedCall]:
        """Read every file from its beginning."""
        for path in sorted(self._directory.glob(FILES)):
            with path.open("rb") as file:
                # Bounded, as a file that is none of ours may be one line of gigabytes.
                for line in iter(functools.partial(file.readline, MAX_LINE_BYTES), b""):
                    entry = _parse(line)
                    if entry is not None:
                        yield entry
                    elif line.strip():
                        self.skipped += 1


def read(directory: Path) -> Entries:
    """Read what was logged to `directory`; lines that are not entries are skipped and counted."""
    return Entries(directory)


def _parse(line: bytes) -> LoggedCall | None:
    try:
        values = json.loads(line)
        # Only what is known: a newer version may write more.
        known = {name: values[name] for name in TYPES}
        when = datetime.fromisoformat(known["time"])
    # RecursionError: `json` raises it for a line of a hundred thousand brackets.
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not all(isinstance(known[name], kind) for name, kind in TYPES.items()):
        return None
    return LoggedCall(**{**known, "time": when})
