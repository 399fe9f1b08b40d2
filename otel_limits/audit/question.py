"""The parts of an audit question: its name, its options, and the function that answers it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit import parsing
from otel_limits.audit.answer import written
from otel_limits.core.errors import LedgerError
from otel_limits.core.secrets import quote_value, redact_value
from otel_limits.core.wording import closest_match
from otel_limits.ledger.calendar import PERIODS
from otel_limits.ledger.options import KEY_PREFIX, OWN_NAMES, Condition
from otel_limits.ledger.rows import MICROSECONDS

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

    from otel_limits.audit.answer import Answer, CellKind, Column
    from otel_limits.core.wording import ProgressBar
    from otel_limits.ledger.address import Address
    from otel_limits.ledger.selection import Selection
    from otel_limits.ledger.waiting_rows import WaitingRows


LEVEL: Final = "level"
"""JSON key of a row's depth in a tree."""

KEY_KINDS: Final[Mapping[str, CellKind]] = {
    **dict.fromkeys(("trace", "invocation", "root", "task"), "id"),
    **dict.fromkeys(PERIODS, "date"),
}


@dataclass(frozen=True, slots=True)
class Option:
    """A command-line option of a question."""

    flag: str
    """E.g. `--by`; without dashes it is a required positional argument."""
    metavar: str
    read: Callable[[str], Any]
    """Parses its text; raises `ArgumentTypeError` with a sentence."""
    help: str
    _: KW_ONLY
    default: Any = None
    is_required: bool = False
    is_repeated: bool = False
    """May be given several times, each with several values, which are combined in one list."""
    is_list: bool = False
    """Takes one or more values, e.g. the names of files."""
    means: str = ""
    """Name of the option that this is another notation for."""
    group: str = ""
    """Heading under which the help lists it."""

    @property
    def name(self) -> str:
        """The parameter of the answering function that receives its value."""
        return self.means or self.flag.lstrip("-").replace("-", "_")


SINCE: Final = Option(
    "--since", "TIME", parsing.instant, "start, e.g. 7d, 2026-11-01 or 2026-11-01T12:00"
)
UNTIL: Final = Option("--until", "TIME", parsing.instant, "end (exclusive), in the same formats")
WHERE: Final = Option(
    "--where",
    "NAME=VALUE",
    parsing.conditions,
    "filter, e.g. tenant.id=acme, agent='research-*', 'tenant.id!=acme', or tenant.id= for rows "
    "without one; repeat or use commas to match any (with != to exclude all), e.g. agent=a,agent=b",
    is_repeated=True,
)
AGENT: Final = Option(
    "--agent",
    "GLOB",
    lambda text: (Condition("agent", text),),
    "short for --where agent=GLOB",
    is_repeated=True,
    means="where",
)
SELECTED: Final = Option(
    "--dashboard-vars",
    "VARIABLES",
    parsing.selected,
    "filter by variables pasted from a dashboard's URL, e.g. var-agent=a&var-agent=b (agents, "
    "models and reasons only)",
    is_repeated=True,
    means="where",
)
WINDOW: Final = (SINCE, UNTIL)
SELECTION: Final = (*WINDOW, AGENT, WHERE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The complete definition of an audit question."""

    name: str
    help: str
    answer: Callable[..., Answer]
    """Receives the `AuditQuery`, and the value of each of `options` by its name."""
    options: Sequence[Option] = ()
    selection: Sequence[Option] = (*SELECTION, SELECTED)
    """Options that select a part of the ledger."""
    tables: Mapping[str, Sequence[Column]] = field(default_factory=dict)
    """Columns of each table of the answer, after those to group by."""
    more: Mapping[str, Sequence[Column]] = field(default_factory=dict)
    """Additional columns of a table, with some options only."""
    optional: frozenset[str] = frozenset()
    """Tables that are only present with some options."""
    has_forecast: bool = False
    has_verdict: bool = False
    """Whether its answer passes or fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditQuery:
    """A query of a part of a ledger."""

    connection: Connection
    ledger: str
    """Its address, without a password."""
    address: Address
    waiting: WaitingRows
    """Rows in spill files that the answer lacks."""
    selection: Selection
    work: ProgressBar
    has_charts: bool
    """False if the answer is shown without charts, so that their queries are skipped."""

    @property
    def about(self) -> str:
        """Describe which part of which ledger is queried."""
        parts = [f"ledger {self.ledger}"]
        if self.selection.since_us is not None:
            parts.append(f"since {written(self.selection.since_us, 'time')} UTC")
        if self.selection.until_us is not None:
            parts.append(f"until {written(self.selection.until_us, 'time')} UTC")
        parts += map(str, self.selection.where)
        # Times are written in UTC, so only other zones are mentioned.
        if str(self.selection.zone) != "UTC":
            parts.append(f"days of {self.selection.zone}")
        return ", ".join(parts)

    def made_at(self, now: float) -> str:
        """Describe when and by which version the answer is made, and the time that it covers."""
        from otel_limits.core.version import own_version
        from otel_limits.ledger import queries

        first, last = queries.first_and_last(self.connection)
        since, until = self.selection.since_us, self.selection.until_us
        begin, end = first if since is None else since, last if until is None else until
        covered = "no invocation"
        if begin is not None and end is not None and begin <= end:
            covered = f"{written(begin, 'time')} to {written(end, 'time')} UTC"
        at = written(int(now * MICROSECONDS), "time")
        return f"Made {at} UTC by otel-limits {own_version()}, covers {covered}"

    @property
    def recorded_period(self) -> str:
        """Return a sentence with the time of the ledger, if the selected one is outside of it."""
        from otel_limits.ledger import queries

        since, until = self.selection.since_us, self.selection.until_us
        if since is None and until is None:
            return ""
        first, last = queries.first_and_last(self.connection)
        if first is None or last is None:
            return ""
        is_outside = (since is not None and since > last) or (until is not None and until <= first)
        times = f"{written(first, 'time')} to {written(last, 'time')} UTC"
        return f"The ledger's invocations are of {times}. " if is_outside else ""

    def key_columns(self, by: Iterable[str], others: Iterable[Column]) -> list[Column]:
        """Build the columns to group by; an ambiguous audit key gets its prefix."""
        from otel_limits.audit.answer import Column

        taken = {LEVEL, *(column.name for column in others)}
        names = [KEY_PREFIX + name if name in taken else name for name in by]
        return [Column(name, name, KEY_KINDS.get(name, "text"), is_key=True) for name in names]

    @property
    def unknown_values(self) -> str:
        """Return sentences about selected values, e.g. an agent, that no row of the ledger has."""
        from otel_limits.ledger import known_values

        sentences = []
        for each in known_values.missing(self.connection, self.selection):
            near = closest_match(each.value, known_values.some(self.connection, each.name))
            hint = "" if near is None else f"; the closest is {quote_value(near)}"
            sentences.append(f"The ledger has no {each.name} {quote_value(each.value)}{hint}. ")
        return "".join(sentences)

    def require_known(self, by: Iterable[str] = ()) -> None:
        """Reject properties that no row has.

        Raises:
            LedgerError: A name is neither a property nor an audit key of this ledger.
        """
        from otel_limits.ledger.selection import audit_keys

        keys = audit_keys(self.connection)
        known = (*OWN_NAMES, *keys)
        names = (*by, *(each.name for each in self.selection.where))
        # With the prefix, too: an audit key may have the name of a property.
        prefixed = {KEY_PREFIX + key for key in keys}
        unknown = [name for name in names if name not in known and name not in prefixed]
        # Rejected rather than answered with nothing: a misspelled name would look like a quiet
        # month.
        if unknown:
            near = closest_match(unknown[0], known)
            hint = f"Did you mean {near}? " if near else ""
            raise LedgerError(
                f"The ledger has no property {redact_value(unknown[0])}. {hint}Available: "
                f"{', '.join(known)}; record more with OTEL_LIMITS_AUDIT_KEYS."
            )
