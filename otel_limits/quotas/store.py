"""The protocol of a store: what is asked of the place where quotas are counted, and its answers.

Every operation has an id, and doing it twice changes nothing the second time: it can be sent again
when its reply was lost. All the counts that an operation names change together or not at all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Literal, TypeAlias

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


class SubscribeDeniedError(StoreError):
    """The store does not let this process listen for kills."""


class StoreAuthenticationError(StoreError):
    """The store does not accept the user, or the password, of this process."""


class StoreOutageError(StoreError):
    """The store is known not to answer, so that nothing was sent."""


class PermanentStoreError(StoreError):
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
class ReadCounts:
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


Operation: TypeAlias = Reserve | Settle | Renew | ReadCounts


@dataclass(frozen=True, slots=True)
class Block:
    """An operator's order that nothing of a key may be used."""

    until: float
    """Seconds since the epoch; `FOREVER` where it holds until it is taken back."""
    reason: str


@dataclass(frozen=True, slots=True)
class CountState:
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
    standings: tuple[CountState, ...] = ()
    """In the order of the demands or charges."""
    unmet: tuple[int, ...] = ()
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

    queue: tuple[str, str] | None = None
    """Quota, and id of the key; `None` where it is not known of which."""


class QuotaStore(ABC):
    """A place where quotas are counted. Methods that are not abstract are optional."""

    @abstractmethod
    def run(self, operations: Sequence[Operation]) -> list[Reply]:
        """Apply `operations` in order; each is atomic.

        Raises:
            StoreError: Some may have been applied. Send all of them again.
        """

    @abstractmethod
    def check(self) -> None:
        """Verify that the store accepts writes.

        Raises:
            StoreError: It does not.
        """

    @abstractmethod
    def now(self) -> float:
        """Return the store's time."""

    @abstractmethod
    def keys(self, quota: str) -> Iterator[Key]:
        """Iterate over recently used keys of a quota, each once.

        Raises:
            StoreError: The store is unavailable.
        """

    @abstractmethod
    def look(self, counts: Sequence[tuple[Count, int]]) -> list[CountState]:
        """Return the state of counts, each given with the amount of its quota.

        However many they are, other operations wait for at most `LOOKED_AT` of them.

        Raises:
            StoreError: The store is unavailable.
        """

    @abstractmethod
    def reset(self, count: Count) -> None:
        """Set usage to 0 for the current window; reservations stay."""

    @abstractmethod
    def grant(self, count: Count, amount: int, until: float) -> None:
        """Raise the limit by `amount` until a time, in seconds since the epoch."""

    def warm(self) -> None:  # noqa: B027  optional
        """Do in advance what the first operation would wait for, such as connecting.

        Raises:
            StoreError: The store is unavailable.
        """

    def after_fork(self) -> None:  # noqa: B027  optional
        """Reset inherited state after a fork: another thread may have held a lock."""

    def close(self) -> None:  # noqa: B027  optional
        """Close connections."""


class SharedStore(QuotaStore):
    """A store for a whole fleet, which can outlive the process that made a reservation."""

    has_channels: ClassVar[bool] = False
    """Whether `messages` pushes kills and freed amounts; without it, processes poll."""

    def messages(
        self,
        since: float,  # noqa: ARG002
        closing: threading.Event,  # noqa: ARG002
    ) -> Iterator[Kill | Freed | None]:
        """Wait for messages until `closing` is set; `None` after a second without any.

        Args:
            since: The store's time; kills sent after it, before this subscription, come first.
            closing: Ends the wait within a second.

        Raises:
            SubscribeDeniedError: Subscribing is not allowed here.
            StoreError: The connection was lost.
        """
        raise SubscribeDeniedError("this store has no channels")

    def missing_rights(self) -> list[str]:
        """Return the access rules that this process lacks, ready to be added.

        Rules that begin with `&` are about channels; quotas are counted without them.

        Raises:
            StoreAuthenticationError: Authentication failed.
            StoreError: The store is unavailable.
        """
        return []

    @abstractmethod
    def expired(self, first: int, most: int) -> list[str]:
        """Return IDs of reservations that expired unsettled, latest first.

        Args:
            first: How many to skip.
            most: How many to return at most.
        """

    @abstractmethod
    def forget_expired(self) -> int:
        """Drop reservations that are too old to be settled; return their number."""

    @abstractmethod
    def mark_settled(self, ids: Sequence[str]) -> None:
        """Note that these expired reservations have been settled."""

    @abstractmethod
    def revoke(self, count: Count) -> int:
        """Revoke the grants of a key; return how many were active."""

    @abstractmethod
    def block(self, count: Count, block: Block) -> None:
        """Refuse every use of a key until a time, regardless of grants."""

    @abstractmethod
    def unblock(self, count: Count) -> int:
        """Remove the blocks of a key; return how many were active."""

    @abstractmethod
    def kill(self, pattern: str) -> int:
        """Send a kill to all processes; return how many received it by a channel."""

    @abstractmethod
    def noted_kills(self, since: float) -> list[Kill]:
        """Return the kills of the last hour that were sent after `since`, the store's time.

        Raises:
            StoreError: The store is unavailable.
        """
