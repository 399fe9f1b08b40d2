"""Failures in a row: invocations that begin with the same input and end with the same failure."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from otel_limits.core.failures import BEGINNING, first_line, without_moving_parts
from otel_limits.core.loops import fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_ROWS: Final = 10_000
"""Conversations, and agents without one, whose last failures are kept; a further one drops the
oldest."""

MAX_SECONDS: Final = 24 * 60 * 60
"""Time after its last failure at which a row is forgotten."""

UNDECIDED: Final = ("aborted", "cancelled", "checkpoint", "evicted", "interrupt")
"""Reasons of invocations that have neither failed nor succeeded."""

OWN_CAPS: Final = ("limit_", "max_", "recursion_")
"""Beginnings of the reasons of frameworks that end an agent at one of their caps."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How an invocation has failed."""

    key: str
    """Equal for equal failures."""
    text: str
    """For the operator."""


def failure_of_error(error: BaseException) -> Failure:
    """Return the failure of an exception: its class and its first line, without moving parts."""
    kind = type(error).__qualname__
    try:
        text = str(error)[:BEGINNING]
    except Exception:  # noqa: BLE001  third-party code
        text = ""
    line = first_line(text)
    key = fingerprint(kind, first_line(without_moving_parts(text)))
    return Failure(key, f"{kind}: {line}" if line else kind)


def failure_of_reason(reason: str) -> Failure:
    """Return the failure of an invocation that was ended for a stop reason."""
    return Failure(reason, reason)


@dataclass(frozen=True, slots=True)
class FailureRow:
    """Failures in a row."""

    given: str
    """Hash of the input that they began with."""
    failure: Failure
    count: int
    at: float
    """Time of the last one."""


class FailureRows:
    """The last failures of each conversation, bounded in number and age."""

    def __init__(self, now: Callable[[], float], most: int = MAX_ROWS) -> None:
        """Create an empty table."""
        self._now, self._most = now, most
        self._rows: OrderedDict[str, FailureRow] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def find(self, owner: str) -> FailureRow | None:
        """Return the last failures of a conversation.

        Args:
            owner: The conversation, and the agent.
        """
        row = self._rows.get(owner)  # nearly always none
        return None if row is None or self._now() - row.at > MAX_SECONDS else row

    def add(self, owner: str, given: str, failure: Failure) -> int:
        """Add a failure with an input, by its hash; return how many there are in a row."""
        with self._lock:
            row, now = self.find(owner), self._now()
            if row is None or (row.given, row.failure.key) != (given, failure.key):
                row = FailureRow(given, failure, 0, now)
            self._rows[owner] = replace(row, failure=failure, count=row.count + 1, at=now)
            self._rows.move_to_end(owner)
            while self._is_over_capacity(now):
                self._rows.popitem(last=False)
            return row.count + 1

    def end(self, owner: str) -> None:
        """End the row of a conversation, in which an invocation has succeeded."""
        self._rows.pop(owner, None)

    def clear(self) -> None:
        """Forget every row."""
        self._rows.clear()

    def after_fork(self) -> None:
        """Forget every row in a child process."""
        self._lock = threading.RLock()
        self.clear()

    def _is_over_capacity(self, now: float) -> bool:
        oldest = next(iter(self._rows.values()))
        return len(self._rows) > self._most or now - oldest.at > MAX_SECONDS
