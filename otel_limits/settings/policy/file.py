"""The policy file on disk: read at the start, and again for new invocations once it has changed."""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from otel_limits.core.events import PolicyRead
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.pricing import MISSING, Prices
from otel_limits.core.secrets import redact_url
from otel_limits.runs.registry import LIVE
from otel_limits.settings.policy.document import NO_DOCUMENT, Document

if TYPE_CHECKING:
    from otel_limits.core.limits import Limits
    from otel_limits.settings.environment import Reading

logger = logging.getLogger("otel_limits")

LOOK_INTERVAL_SECONDS: Final = 1.0
"""How often it is looked whether the file has changed, at most."""

MAX_BYTES: Final = 1_000_000
"""A policy is read on the thread of an agent: one of this length takes seconds."""

NONBLOCK: Final = getattr(os, "O_NONBLOCK", 0)
"""Windows has neither the flag nor what it is for."""

Stamp: TypeAlias = "tuple[int, ...] | None"
"""Times of change, size and inode of the file; `None` where there is none."""


class PolicyFile:
    """The policy file of a process.

    Attributes:
        document: What applies now: the newest version without a mistake.
        mistakes: What is wrong with the newest version.
    """

    def __init__(
        self, path: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read the file; without a path there is none, and it says nothing."""
        self._path = path
        self._shown = redact_url(path or "")
        self._clock = clock
        self._lock = threading.Lock()
        self._next_look = clock() + LOOK_INTERVAL_SECONDS
        self._stamp: Stamp = None
        self._content: bytes | None = None
        # Replaced whole and never changed: invocations read it without a lock.
        self.document: Document = NO_DOCUMENT
        self.mistakes: tuple[str, ...] = ()
        if path is not None:
            # Before it is read, as in `_look`: what changes in between is seen at the next look.
            self._stamp = _stamp(path)
            self._read(path)

    @suppress_errors("policy")
    def refresh(self) -> None:
        """Read the file again if it has changed; one that has a mistake leaves all as it was.

        Meant for the start of an invocation: it looks once a second at most, and while one thread
        looks the others go on with what they have.
        """
        path = self._path
        # Before the lock, as every invocation of every thread comes by here.
        if path is None or self._clock() < self._next_look:
            return
        # Whoever finds it held does not wait: the version before is as good for one more
        # invocation.
        if self._lock.acquire(blocking=False):
            try:
                is_new = self._look(path)
            finally:
                self._lock.release()
            # Outside the lock, as it logs and tells observers.
            if is_new:
                self.announce()

    def announce(self) -> None:
        """Log and tell whether the newest version was taken."""
        if self._path is None:
            return
        LIVE.observers.publish(PolicyRead(path=self._shown, valid=not self.mistakes))
        if not self.mistakes:
            logger.info("otel-limits: the policy %s is in force.", self._shown)
            return
        LIVE.observers.publish_internal_error("policy")
        in_force = (
            "No policy file is in force; every other setting is."
            if self.document is NO_DOCUMENT
            else "The version before it stays in force."
        )
        for mistake in self.mistakes:
            logger.error("otel-limits: %s %s", mistake, in_force)

    def renew_lock(self) -> None:
        """Replace the lock in a forked child: another thread may have held it."""
        self._lock = threading.Lock()

    def _look(self, path: str) -> bool:
        """Read the file if it is not the one that was read last; True when it says otherwise."""
        self._next_look = self._clock() + LOOK_INTERVAL_SECONDS
        stamp = _stamp(path)
        if stamp == self._stamp:
            return False
        # Before the file is read: one that changes meanwhile has another stamp at the next look.
        self._stamp = stamp
        return self._read(path)

    def _read(self, path: str) -> bool:
        try:
            content = _content(path)
        except (OSError, ValueError) as error:
            # Forgotten, so that the same content counts as new when the file can be read again.
            self._content = None
            reason = getattr(error, "strerror", None) or error
            self.mistakes = (f"{self._shown} cannot be read: {reason}.",)
            return True
        # `touch`, or a deployment that writes every file anew, says nothing new.
        if content == self._content:
            return False
        # Kept also where it has a mistake, which is then told once and not every second.
        self._content = content
        document, self.mistakes = _parse(content, self._shown)
        # With a mistake the version before stays in force: no deployment disarms agents.
        if not self.mistakes:
            self.document = document
        return True


NO_FILE: Final = PolicyFile()
"""What is used where no policy file was named."""


def price_mistakes(limits: Iterable[Limits], document: Document) -> list[str]:
    """Say that a limit on cost is asked for where no price can be known.

    That the policy file itself asks for one is a mistake of the file.
    """
    capped = any(each.max_cost_usd is not None for each in limits)
    if not capped or Prices(document.price_list()).available:
        return []
    return [f"max_cost_usd {MISSING}"]


def policy_mistakes(reading: Reading, policy_file: PolicyFile) -> list[str]:
    """Say what is wrong with the policy file, and with what the environment asks of it."""
    policy = reading.settings.policy
    return [
        *policy_file.mistakes,
        *price_mistakes([policy.limits, policy.tree], policy_file.document),
    ]


def _content(path: str) -> bytes:
    """Read a file that is not too long, without waiting for anybody.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not a regular file, or too long.
    """
    # Opening a FIFO would wait for who writes to it, and agents would wait with us.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        # One more than is permitted: the size that the system tells may have changed by now.
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"it is longer than {MAX_BYTES:,} bytes")
    return content


def _parse(content: bytes, path: str) -> tuple[Document, tuple[str, ...]]:
    from otel_limits.settings.policy.reader import (
        parse,  # a process without a file does without YAML
    )

    try:
        return parse(content.decode(), path)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        return NO_DOCUMENT, (f"{path}:{line}: The file is not UTF-8 text.",)


def _stamp(path: str) -> Stamp:
    """What changes with every version, and with the right to read it."""
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    # `chmod` changes only the second, a file moved into its place perhaps only the last.
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino
