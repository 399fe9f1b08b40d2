"""The protocol of a store: what is asked of the place where quotas are counted, and its answers.

Every operation has an id, and doing it twice changes nothing the second time: it can be sent again
when its reply was lost. All the counts that an operation names change together or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    import threading

    from otel_limits.quotas.keys import Key
    from otel_limits.quotas.windows import Window

RETENTION_SECONDS: Final = 25 * 3600
"""How long a count outlives its window: a clock that is set back by a day finds it again."""

REMEMBERED_SECONDS: Final = 3600
"""How long the id of an operation is remembered, so that it is not done twice."""

RECOVERABLE_SECONDS: Final = 3000
"""How long a settlement that nobody sent is looked for: well before its id is forgotten."""

# Several times as long as a worker of the largest fleet takes to look again.
WORKER_SECONDS: Final = 60
"""How long a process that does not look any more is counted as a worker."""

DOUBTFUL: Final = 2
"""Factor for a reservation of unknown size, unless it is the only such one at the time."""


FOREVER: Final = 253_402_300_799.0
"""The end of the year 9999, in seconds since the epoch."""

LOOKED_AT: Final = 200
"""Counts that are looked at in one step, while every operation of others waits."""


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Where a store is, and how it is asked."""

    url: str
    timeout: float
    """Seconds after which it counts as gone."""
    namespace: str = ""
    """What is counted in another one is not touched."""


class StoreError(Exception):
    """The store did not answer in time, or answered that it cannot do what it was asked."""


class DeafError(StoreError):
    """The store does not let this process listen for kills."""


class NotLetInError(StoreError):
    """The store does not accept the user, or the password, of this process."""


class StoreLostError(StoreError):
    """The store is known not to answer, so that nothing was sent."""


class ImpossibleError(StoreError):
    """The store answers, and can never do what it was asked, because of what stands there."""


@dataclass(frozen=True, slots=True)
class Count:
    """One thing that is counted: one key of one quota in one window."""

    quota: str
    key: str
    """Id of the key, a hash."""
    window: Window
    unit: str
    """What its numbers count."""
    shown: str = ""
    """The key for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a model call needs of one count."""

    count: Count
    amount: int
    limit: int
    enforced: bool = True
    """False when it is reserved even if there is not enough."""
    certain: bool = True
    """False to set aside twice the amount, unless it is the only such call at the time."""
    alone: bool = False
    """True to admit it as the only call at the time even when it is more than the whole limit."""
    known: int = 0
    """What the asker saw used before: from there a store goes on that has lost the count."""
    lease_seconds: float | None = None
    """Instead of those of the whole reservation."""
    waits: float = 0.0
    """Seconds for which the asker waits where there is not enough; it is told when that changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What a model call took of one count."""

    count: Count
    amount: int
    known: int = 0


@dataclass(frozen=True, slots=True)
class Reserve:
    """Set aside what a call may take at most, of all counts or of none."""

    id: str
    demands: tuple[Demand, ...]
    lease_seconds: float
    """After this the reservation is void: whoever made it is taken for dead."""

    def lease_of(self, demand: Demand) -> float:
        """Return for how many seconds a demand is met."""
        return demand.lease_seconds or self.lease_seconds


@dataclass(frozen=True, slots=True)
class Settle:
    """Count what a call really took, and give back what was set aside for it."""

    id: str
    """The id of its reservation."""
    charges: tuple[Charge, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """Tell how counts stand; nothing is changed."""

    id: str
    counts: tuple[tuple[Count, int], ...]
    """Each with the amount of its quota."""
    worker: str = ""
    """Id of the process, where it is to be counted as a worker; this is noted."""


@dataclass(frozen=True, slots=True)
class Renew:
    """Let the leases of an operation last as long as new ones, where they have not ended."""

    id: str
    """The id of the reservation."""
    counts: tuple[Count, ...]
    lease_seconds: float


Operation: TypeAlias = Reserve | Settle | Renew | Look


@dataclass(frozen=True, slots=True)
class Block:
    """An operator's order that nothing of a key may be used."""

    until: float
    """Seconds since the epoch; `FOREVER` where it holds until it is taken back."""
    reason: str


@dataclass(frozen=True, slots=True)
class Standing:
    """How one count stands."""

    used: int
    reserved: int
    limit: int
    """What the quota permits, grants included; 0 in the reply to a settlement."""
    block: Block | None = None

    @property
    def remaining(self) -> int:
        """What can still be reserved."""
        return max(0, self.limit - self.used - self.reserved) if self.block is None else 0


Status: TypeAlias = Literal[
    "admitted", "refused", "settled", "renewed", "looked", "elsewhere", "failed"
]
"""`elsewhere`: a window does not hold the store's time; nothing was changed. `failed`: what stands
in the store under a key of this operation is not ours, so that it can never be done."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one operation."""

    status: Status
    now: float
    """The store's time, in seconds since the epoch."""
    standings: tuple[Standing, ...] = ()
    """In the order of the demands or charges."""
    lacking: tuple[int, ...] = ()
    """Which demands could not be met, by position; enforced or not."""
    changes_at: float = math.inf
    """When a reservation ends by itself that was in the way; the store's time."""
    error: str = ""
    """Why it failed."""
    workers: int = 0
    """How many processes look at the store, in the reply to a worker's look."""
    last_kill: float = 0.0
    """When agents were last told to end, in the reply to a reservation; the store's time."""


@dataclass(frozen=True, slots=True)
class Kill:
    """The order to end agents."""

    id: str
    pattern: str
    """Name of the agents; `*` and `?` stand for any characters."""
    at: float
    """The store's time at which it was given: what begins later is not meant."""


@dataclass(frozen=True, slots=True)
class Freed:
    """Something of a count may have become free."""

    line: tuple[str, str] | None = None
    """Quota, and id of the key; `None` where it is not known of which."""


class QuotaStore(Protocol):
    """A place where quotas are counted."""

    def run(self, operations: Sequence[Operation]) -> list[Reply]:
        """Do `operations` in order; each is atomic.

        Raises:
            StoreError: Some may have been done and some not: do all of them again.
        """

    def warm(self) -> None:
        """Do beforehand what the first operation would have to wait for.

        Raises:
            StoreError: The store does not answer.
        """

    def check(self) -> None:
        """Make sure that the store can be written to.

        Raises:
            StoreError: It cannot.
        """

    def now(self) -> float:
        """Return the store's time."""

    def keys(self, quota: str) -> Iterator[Key]:
        """Go through the keys of a quota that were used lately, each once.

        Raises:
            StoreError: The store does not answer.
        """

    def look(self, counts: Sequence[tuple[Count, int]]) -> list[Standing]:
        """Return how counts stand, each given with the amount of its quota.

        However many they are, no operation of others waits for more than `LOOKED_AT` of them.

        Raises:
            StoreError: The store does not answer.
        """

    def reset(self, count: Count) -> None:
        """Begin to count from 0 in the present window; what is reserved stays so."""

    def grant(self, count: Count, amount: int, until: float) -> None:
        """Permit `amount` more until a time, in seconds since the epoch."""

    def after_fork(self) -> None:
        """Make it usable in a child: another thread may have held a lock."""

    def close(self) -> None:
        """Let go of connections."""


class SharedStore(QuotaStore, Protocol):
    """A place where a whole fleet counts, which can outlive whoever reserved there."""

    def missing_rights(self) -> list[str]:
        """Return what its access rules do not permit this process, as rules to be added.

        Those that begin with `&` are about listening; without them quotas are counted all the same.

        Raises:
            NotLetInError: It accepts no user or password of ours.
            StoreError: The store does not answer.
        """

    def expired(self, first: int, most: int) -> list[str]:
        """Return ids of reservations that nobody settled in time, the latest first.

        Args:
            first: How many of them to leave out.
            most: How many to return at most.
        """

    def forget_expired(self) -> int:
        """Drop reservations that are too old to be settled; returns how many there were."""

    def revoke(self, count: Count) -> int:
        """Take back what was granted to a key; returns how many grants were in force."""

    def block(self, count: Count, block: Block) -> None:
        """Permit nothing of a key until a time, whatever was granted."""

    def unblock(self, count: Count) -> int:
        """Take back the blocks of a key; returns how many were in force."""

    def done(self, ids: Sequence[str]) -> None:
        """Note that these reservations have been settled after all."""

    def kill(self, pattern: str) -> int:
        """Tell every listening process to end agents; returns how many heard it."""

    def messages(self, since: float, closing: threading.Event) -> Iterator[Kill | Freed | None]:
        """Wait for what others tell, until `closing` is set; `None` after a second without any.

        Args:
            since: The store's time; a kill that was sent after it while nobody listened comes
                first.
            closing: Ends the waiting within a second.

        Raises:
            DeafError: Listening is not permitted here.
            StoreError: The connection was lost.
        """

    def noted_kills(self, since: float) -> list[Kill]:
        """Return the kills of the last hour that were given after `since`, the store's time.

        Raises:
            StoreError: The store does not answer.
        """
