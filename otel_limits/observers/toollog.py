"""Records arguments and results of tool calls for post-mortems. Off by default.

Only this log stores contents. Events never carry them, so the binding writes to it directly. Each
process appends to its own file, one JSON object per line, readable only by the owner.
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
from otel_limits.core.secrets import redact_value
from otel_limits.core.values import WHOLE_NUMBER
from otel_limits.core.wording import pluralize
from otel_limits.ledger.files import make_directory

if TYPE_CHECKING:
    from otel_limits.core.events import Invocation

logger = logging.getLogger("otel_limits")

COMPONENT: Final = "tool_log"

CHARACTERS: Final = 2_000
"""Maximum length of recorded arguments and results; the rest is cut off."""

FILES: Final = "tools-*.ndjson"

MAX_LINE_BYTES: Final = 1_000_000
"""Maximum length of a line when reading. Every entry is shorter."""

NO_FOLLOW: Final[int] = getattr(os, "O_NOFOLLOW", 0)
"""Open flag that refuses a symbolic link in place of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedCall:
    """One tool call with its arguments and result."""

    time: datetime
    """When the entry was written, in UTC."""
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
"""Keys of an entry in JSON, with the types of their values."""


class ToolLog:
    """Appends every n-th tool call, and each one that caused a halt, to the file of this process.

    The file is opened for each entry, because a fork, a rotation or a daemon that closes its files
    would break an open one. A failed write is counted, logged at most once a minute, and does not
    affect the agent.

    Attributes:
        failed: Entries that could not be written.
    """

    def __init__(
        self, directory: Path, interval: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create a log; its directory is created with the first entry.

        Args:
            directory: Directory of the files.
            interval: Write every n-th tool call of an invocation.
            clock: Monotonic clock in seconds, for the interval between warnings.

        Raises:
            ValueError: `interval` is below 1.
        """
        self.failed = 0
        self._directory = directory
        self._interval = WHOLE_NUMBER.of_value("interval", interval)
        self._clock = clock
        self._warned = -LOG_INTERVAL_SECONDS
        # In addition to the process ID, which is reused: in a container it is often 1.
        self._id = uuid.uuid4().hex[:8]
        self._torn = False

    @property
    def path(self) -> Path:
        """The file of this process; a forked child has its own."""
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
        """Write one finished tool call if it is due.

        Args:
            invocation: The invocation that made the call.
            number: 1 for the first tool call of the invocation.
            tool: Name of the tool.
            arguments: Its arguments, as JSON values.
            result_text: Its result.
            trigger: True if it caused the halt, in which case it is always written.
        """
        # A post-mortem starts with the call that caused the halt.
        if not trigger and number % self._interval:
            return
        entry = LoggedCall(
            time=datetime.fromtimestamp(time.time(), timezone.utc),
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
        """Append a line in one write, after a newline if the last one was truncated."""
        # For each entry, because a cleanup may have deleted the directory.
        make_directory(self._directory)
        with FileIO(self.path, "ab", opener=_open_private) as file:
            line = b"\n" + line if self._torn else line
            written = file.write(line)
        # On a full disk, a write can be partial without an error.
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
            "otel-limits: cannot write the tool log to %s: %s. The agent continues; %s lost.",
            redact_value(str(self._directory)),
            error.strerror,
            pluralize(self.failed, "entry", "entries"),
        )


def _open_private(path: str, flags: int) -> int:
    # Readable only by the owner from its creation: arguments may contain secrets.
    return os.open(path, flags | NO_FOLLOW, 0o600)


def _text(arguments: object) -> str:
    try:
        return json.dumps(arguments, ensure_ascii=False, default=str)
    except (TypeError, ValueError):  # keys or cycles that JSON does not support
        return repr(arguments)


def _line(entry: LoggedCall) -> bytes:
    """Return an entry as a line of JSON; lone surrogates are escaped."""
    values = {name: getattr(entry, name) for name in TYPES}
    values["time"] = entry.time.isoformat()
    return json.dumps(values, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


class Entries:
    """The entries of all processes, file by file in the order written.

    Attributes:
        skipped: Number of malformed lines, e.g. those a killed process left.
    """

    def __init__(self, directory: Path) -> None:
        """Create an iterable; each iteration reads the files."""
        self.skipped = 0
        self._directory = directory

    def __iter__(self) -> Iterator[LoggedCall]:
        """Yield the entries of every file."""
        for path in sorted(self._directory.glob(FILES)):
            with path.open("rb") as file:
                # Bounded, because another program's file may be one line of gigabytes.
                for line in iter(functools.partial(file.readline, MAX_LINE_BYTES), b""):
                    entry = _parse(line)
                    if entry is not None:
                        yield entry
                    elif line.strip():
                        self.skipped += 1


def read(directory: Path) -> Entries:
    """Return the entries logged to `directory`; malformed lines are skipped and counted."""
    return Entries(directory)


def _parse(line: bytes) -> LoggedCall | None:
    try:
        values = json.loads(line)
        # Only known keys, because a newer version may write more.
        known = {name: values[name] for name in TYPES}
        when = datetime.fromisoformat(known["time"])
    # `json` raises RecursionError for deeply nested brackets.
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not all(isinstance(known[name], kind) for name, kind in TYPES.items()):
        return None
    return LoggedCall(**{**known, "time": when})
