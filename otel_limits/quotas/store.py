"""The protocol of quota stores: operations, replies, and what a store must and may do.

Operations are idempotent by ID, so one can be sent again if its reply was lost. An operation
changes all of its counts atomically.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import threading

    from otel_limits.quotas.keys import Key
    from otel_limits.quotas.windows import Window

RETENTION_SECONDS: Final = 25 * 3600
"""How long a count outlives its window: it survives a clock set back by a day."""

REMEMBERED_CALLS: Final = 20
"""Calls of a model by whose mean usage a lost call is charged."""

REMEMBERED_MODELS: Final = 256
"""Models of a quota whose last calls are remembered: those called last."""

REMEMBERED_SECONDS: Final = 3600
"""How long operation IDs are remembered, to apply each once."""

RECOVERABLE_SECONDS: Final = 3000
"""How long a missing settlement is searched for: well below `REMEMBERED_SECONDS`."""

# Several times the longest read interval of a worker.
WORKER_SECONDS: Final = 60
"""How long a process counts as a worker after its last read."""

DOUBTFUL: Final = 2
"""Factor for a reservation of unknown size, unless it is the only such one at the time."""

MOST_NEEDS: Final = 10
"""Waiting calls for which later ones leave room: those that have waited longest."""

NEED_SECONDS: Final = 10.0
"""How long later calls leave room for a waiting one that does not ask again."""

BURSTS: Final = 10
"""Default bursts per amount of a token bucket."""

FOREVER: Final = 253_402_300_799.0
"""The end of the year 9999, in seconds since the epoch."""

LOOKED_AT: Final = 200
"""Counts read in one step, which blocks all other operations."""


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Connection settings of a store."""

    url: str
    timeout: float
    """Seconds after which it counts as unavailable."""
    namespace: str = ""
    """Isolates the counts of fleets that share a server."""


class StoreError(Exception):
    """The store did not answer in time, or answered with an error."""


class SubscribeDeniedError(StoreError):
    """The store does not allow this process to subscribe."""


class StoreAuthenticationError(StoreError):
    """The store rejected the user or password of this process."""


class StoreOutageError(StoreError):
    """The store is known to be unavailable; nothing was sent."""


class PermanentStoreError(StoreError):
    """The store is available, but stored data makes the operation impossible.

    Args:
        reason: Why it is.
        damaged: The positions of the counts with that data, if they are known.
    """

    def __init__(self, reason: str, damaged: tuple[int, ...] = ()) -> None:
        """Create the error."""
        super().__init__(reason)
        self.damaged = damaged


@dataclass(frozen=True, slots=True)
class Refill:
    """How a token bucket refills: its amount returns evenly over a time."""

    seconds: int
    burst: int = 0
    """Parts that a full bucket holds; 0 for a tenth of the amount."""

    def capacity(self, amount: int) -> int:
        """Return what a full bucket holds if this amount returns in the time."""
        return self.burst or -(-amount // BURSTS)


CountName: TypeAlias = tuple[str, str, str, int]
"""Quota, unit, key ID and first second of the window."""

QuotaKey: TypeAlias = tuple[str, str, str]
"""Quota, unit and key ID, without the window."""


@dataclass(frozen=True, slots=True)
class Count:
    """One counter: one key of one quota in one window."""

    quota: str
    key: str
    """Id of the key, a hash."""
    window: Window
    unit: str

    shown: str = ""
    """The key as displayed."""
    refill: Refill | None = None
    """Set for a token bucket, whose usage flows back; its window never ends."""

    @property
    def name(self) -> CountName:
        """Its identity."""
        return self.quota, self.unit, self.key, self.window.start

    @property
    def quota_key(self) -> QuotaKey:
        """The identity of its key."""
        return self.quota, self.unit, self.key


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The reservation of a model call in one count."""

    count: Count
    amount: int
    limit: int
    planned: bool = False
    """If true, the limit depends on the call: the store keeps it for those who read the count."""
    enforced: bool = True
    """If false, reserved even if the remainder is too small."""
    certain: bool = True
    """If false, the amount is doubled while other such calls are in flight."""
    alone: bool = False
    """If true, admitted as the only call in flight even if it exceeds the whole limit."""
    known: int = 0
    """Last usage seen by the client: a store that lost the count continues from it."""
    lease_seconds: float | None = None
    """Overrides the lease of the reservation."""
    waits: float = 0.0
    """Maximum seconds the client waits if refused; it is notified of releases."""
    model: str = ""
    """The model by whose last calls it is charged if its lease expires; empty if it is not."""

    @property
    def capacity(self) -> int:
        """The limit of its reservation, before changes in the store."""
        refill = self.count.refill
        return self.limit if refill is None else refill.capacity(self.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """The usage of a model call in one count."""

    count: Count
    amount: int
    known: int = 0
    model: str = ""
    """The model to whose last calls it is added; empty if it is not."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Reserve the worst case of a call in all of its counts, or in none."""

    id: str
    demands: tuple[Demand, ...]
    lease_seconds: float
    """The reservation expires after this, and may be charged: its worker is presumed dead."""
    waited: float = 0.0
    """Seconds that the call has waited, if a demand waits. Later calls leave room for it."""

    def lease_of(self, demand: Demand) -> float:
        """Return the lease of a demand, in seconds."""
        return demand.lease_seconds or self.lease_seconds


@dataclass(frozen=True, slots=True)
class Settle:
    """Count the actual usage of a call and release its reservation."""

    id: str
    """The id of its reservation."""
    charges: tuple[Charge, ...]
    is_earlier: bool = False
    """Whether its call may have ended before the current run of the store."""


@dataclass(frozen=True, slots=True)
class KnownCount:
    """The usage of a count in earlier runs of the store, as a process or a ledger knows it."""

    count: Count
    used: int
    reset: str = ""
    """The last reset that its usage follows, as in `CountState`."""
    seen: int | None = None
    """Usage in the store when this was found; `None` if it was found in an earlier run."""


@dataclass(frozen=True, slots=True)
class ReadCounts:
    """Read the state of counts without changing them."""

    counts: tuple[tuple[Count, int], ...]
    """Each with the amount of its quota."""
    worker: str = ""
    """ID of the process, if it registers as a worker with this read."""


@dataclass(frozen=True, slots=True)
class Renew:
    """Renew the unexpired leases of an operation."""

    id: str
    """The id of the reservation."""
    demands: tuple[Demand, ...]
    lease_seconds: float
    again: bool = False
    """If true, what the store lost is reserved again."""


@dataclass(frozen=True, slots=True)
class CountConversation:
    """Add to the record of a conversation, and read it."""

    id: str
    conversation: str
    """Its hash."""
    agent: str
    parts: Mapping[str, int]
    """Name of each sum → the number that is added."""
    idle_seconds: float
    """The record expires after this time without an addition."""


@dataclass(frozen=True, slots=True)
class ReadConversation:
    """Read the record of a conversation."""

    conversation: str
    """Its hash."""


Operation: TypeAlias = Reserve | Settle | Renew | ReadCounts | CountConversation | ReadConversation


@dataclass(frozen=True, slots=True)
class Reset:
    """Set usage to 0 for the current window; reservations stay."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Raise the limit of a key until a time."""

    amount: int
    until: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class SetLimit:
    """Replace the amount of a key, before grants, until a time."""

    amount: int
    until: float
    """Seconds since the epoch; `FOREVER` if it lasts until withdrawn."""


@dataclass(frozen=True, slots=True)
class Block:
    """Refuse every use of a key until a time, regardless of grants."""

    until: float
    """Seconds since the epoch; `FOREVER` if it lasts until withdrawn."""
    reason: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Withdraw all changes of a kind."""

    kind: type[Grant | SetLimit | Block]


Change: TypeAlias = Reset | Grant | SetLimit | Block | Withdraw
"""An operator's change of a key."""


@dataclass(frozen=True, slots=True)
class CountState:
    """The state of one count."""

    used: int
    reserved: int
    limit: int
    """Including grants; of a token bucket, when it is full. 0 in the reply to a settlement."""
    block: Block | None = None
    reset: str = field(default="", compare=False)
    """Time and ID of the last reset in this window: the later of two is the greater text."""
    full_at: float = field(default=0.0, compare=False)
    """When a token bucket is full again if all reservations are used; 0 for other counts."""

    @property
    def remaining(self) -> int:
        """Amount that can still be reserved."""
        return max(0, self.limit - self.used - self.reserved) if self.block is None else 0


def resets_at(count: Count, state: CountState | None, now: float) -> float:
    """Return when a count is reset, or a token bucket is full; the store's time."""
    if count.refill is None:
        return count.window.end
    return max(now, state.full_at if state is not None else 0.0)


@dataclass(frozen=True, slots=True)
class ConversationRecord:
    """The record of a conversation in a store."""

    conversation: str
    """Its hash."""
    agent: str
    sums: Mapping[str, int]
    changed_at: float
    """When something was last added; the store's time."""


Status: TypeAlias = Literal[
    "admitted", "refused", "settled", "renewed", "looked", "elsewhere", "lost", "closed", "failed"
]
"""All but the first five changed nothing. `elsewhere`: a window does not contain the store's time.
`lost`: the store may have lost counts, and this process has yet to restore them. `closed`: others
have. `failed`: a key holds data of another program, so the operation can never be applied."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one operation."""

    status: Status
    now: float
    """The store's time, in seconds since the epoch."""
    states: tuple[CountState, ...] = ()
    """In the order of the demands, charges or counts."""
    unmet: tuple[int, ...] = ()
    """Positions of the demands that could not be met, enforced or not; in a failure, of the counts
    whose data cannot be read."""
    changes_at: float = math.inf
    """When the first blocking reservation expires, or enough has flowed back; the store's time."""
    error: str = ""
    """Set if it failed."""
    workers: int = 0
    """Processes that may use local shares, in the reply to a worker's `ReadCounts`."""
    living: int = 0
    """All processes of the fleet, in the same reply."""
    last_kill: float = 0.0
    """When the last kill was sent, in the reply to a reservation; the store's time."""
    conversation: ConversationRecord | None = None
    """The record that was read; `None` if there is none."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A request to kill invocations."""

    id: str
    pattern: str
    """Glob for agent names."""
    at: float
    """When it was sent, by the store's clock: later invocations are unaffected."""


@dataclass(frozen=True, slots=True)
class Freed:
    """Notification that part of a count may have been released."""

    queue: tuple[str, str] | None = None
    """Quota and key ID; `None` if unknown."""


@runtime_checkable
class QuotaStore(Protocol):
    """A store that counts quotas."""

    def run(self, operations: Sequence[Operation]) -> list[Reply]:
        """Apply `operations` in order; each is atomic.

        Raises:
            StoreError: Some may have been applied. Send all of them again.
        """

    def now(self) -> float:
        """Return the store's time."""

    def keys(self, quota: str) -> Iterator[Key]:
        """Iterate over recently used keys of a quota, each once."""

    def look(self, counts: Sequence[tuple[Count, int]]) -> list[CountState]:
        """Return the state of counts, each given with the amount of its quota.

        However many they are, other operations wait for at most `LOOKED_AT` of them.
        """

    def change(self, count: Count, change: Change) -> int:
        """Change a count, or its key in all windows; return how many active changes it withdrew.

        Raises:
            PermanentStoreError: Another program overwrote the data to change.
            StoreError: The store is unavailable, or lacks this kind of change.
        """

    def after_fork(self) -> None:
        """Reset inherited state in a child: another thread may have held a lock."""


@runtime_checkable
class SharedStore(QuotaStore, Protocol):
    """A store shared by a fleet; every method raises `StoreError` if it is unavailable.

    The protocols below are abilities that a store may have. A user of one tests for it with
    `isinstance`, and does without it.
    """

    def check(self) -> None:
        """Verify that the store accepts writes."""

    def close(self) -> None:
        """Close connections."""


@runtime_checkable
class Diagnoses(SharedStore, Protocol):
    """Reports an unsuitable server or user, and connects in advance."""

    def warm(self) -> str:
        """Connect, so that the first operation need not wait for it; return as `outdated`."""

    def outdated(self) -> str:
        """Return what is wrong with the store's version; empty if nothing is, or it is unknown."""

    def missing_rights(self) -> list[str]:
        """Return the access rules that this process lacks, ready to be added.

        Rules that begin with `&` are about channels; quotas are counted without them.

        Raises:
            StoreAuthenticationError: Authentication failed.
        """


@runtime_checkable
class Restores(SharedStore, Protocol):
    """Notices that it lost counts, and restores them from what processes and ledgers know.

    A run is the time between two losses.
    """

    def restore(self, counts: Sequence[KnownCount]) -> str:
        """Restore counts that the store lost; return the name of its current run.

        The greater usage wins, unless a later reset is known. Repeating it changes nothing.
        """

    def follow(self, run: str) -> None:
        """From now on, apply operations of this instance in this run only, else reply `lost`."""

    def join(self, worker: str, known: int, least: float, most: float) -> float | None:
        """Join the run that this instance follows, after restoring what the process knows.

        Args:
            worker: ID of the process.
            known: How many processes it knew in an earlier run; 0 if it was in none.
            least: Seconds for which admissions wait after a restart, for unknown processes.
            most: Seconds for which they wait for the known ones to join, at most.

        Returns:
            The seconds for which admissions still wait; `None` if another run has begun, or this
            instance follows none.
        """

    def begin_rebuilding(self, source: str) -> float | None:
        """Let this process rebuild counts of the current run from a ledger.

        Args:
            source: The name of the ledger.

        Returns:
            When the run began, in the store's time; 0 if nothing has to be rebuilt from this
            ledger; `None` before calls are admitted, and while another process does it.
        """

    def count_from_ledger(self, operations: Sequence[str]) -> set[str]:
        """Settle calls that ended before the current run, because their usage is being rebuilt.

        Returns:
            Those that were counted in this run, and must not be rebuilt.
        """

    def end_rebuilding(self) -> None:
        """Record that the counts were rebuilt."""


@runtime_checkable
class NotesExpired(SharedStore, Protocol):
    """Keeps the IDs of reservations that expired unsettled."""

    def expired(self, first: int, most: int) -> list[str]:
        """Return their IDs, latest first.

        Args:
            first: How many to skip.
            most: How many to return at most.
        """

    def forget_expired(self) -> int:
        """Drop those that are too old to be settled; return their number."""

    def mark_settled(self, ids: Sequence[str]) -> None:
        """Drop those that were settled late."""


@runtime_checkable
class KeepsConversations(SharedStore, Protocol):
    """Keeps one record of each conversation, and runs the operations on them."""

    def conversations(self) -> Iterator[ConversationRecord]:
        """Iterate over the records that have not expired, each once."""

    def forget_conversation(self, conversation: str) -> bool:
        """Drop the record with this hash; False if there is none."""


@runtime_checkable
class SendsKills(SharedStore, Protocol):
    """Delivers kills to all processes of the fleet, which poll for them."""

    def kill(self, pattern: str) -> int:
        """Send a kill to all processes; return how many received it by a channel."""

    def noted_kills(self, since: float) -> list[Kill]:
        """Return the kills of the last hour that were sent after `since`, the store's time."""


@runtime_checkable
class Publishes(SharedStore, Protocol):
    """Delivers kills and freed amounts as they happen, instead of by polling."""

    def subscribe(self, since: float, closing: threading.Event) -> Iterator[Kill | Freed | None]:
        """Wait for messages until `closing` is set; `None` after a second without any.

        Args:
            since: The store's time; kills sent after it, before this subscription, come first.
            closing: Ends the wait within a second.

        Raises:
            SubscribeDeniedError: Subscribing is not allowed here.
            StoreError: The connection was lost.
        """
