"""What a question of an audit is made of: its name, its options, and the function that answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit import asking
from otel_limits.audit.formatting import written
from otel_limits.core.errors import LedgerError
from otel_limits.core.wording import closest_match
from otel_limits.ledger.calendar import PERIODS
from otel_limits.ledger.words import KEY_PREFIX, OWN_NAMES

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

    from otel_limits.audit.answers import Answer, CellKind, Column
    from otel_limits.core.wording import ProgressBar
    from otel_limits.ledger.address import Address
    from otel_limits.ledger.reading import Waiting
    from otel_limits.ledger.selection import Selection


LEVEL: Final = "level"
"""What JSON calls the depth of a row in a tree."""

KEY_KINDS: Final[Mapping[str, CellKind]] = {
    **dict.fromkeys(("trace", "invocation", "root"), "id"),
    **dict.fromkeys(PERIODS, "date"),
}


@dataclass(frozen=True, slots=True)
class Option:
    """One thing that can be said with a question."""

    flag: str
    """Such as `--by`; without dashes it has to be said, and is known by its place."""
    metavar: str
    read: Callable[[str], Any]
    """Reads its text; raises `ArgumentTypeError` with a sentence."""
    help: str
    _: KW_ONLY
    default: Any = None
    is_required: bool = False
    is_repeated: bool = False
    """It can be given several times, and each time read as several; its value is a list of all."""
    means: str = ""
    """Name of the option for which it is another way to write."""
    group: str = ""
    """Title under which the help lists it."""

    @property
    def name(self) -> str:
        """The parameter of the answering function that gets its value."""
        return self.means or self.flag.lstrip("-").replace("-", "_")


SINCE: Final = Option("--since", "TIME", asking.instant, "7d, 2026-11-01 or 2026-11-01T12:00")
UNTIL: Final = Option("--until", "TIME", asking.instant, "the end, in the same forms; not included")
WHERE: Final = Option(
    "--where",
    "NAME=VALUE",
    asking.conditions,
    "only these, such as tenant.id=acme or agent='research-*'; can be repeated, also with commas: "
    "agent=a,agent=b is either",
    is_repeated=True,
)
AGENT: Final = Option(
    "--agent",
    "GLOB",
    lambda text: (("agent", text),),
    "the same as --where agent=GLOB",
    is_repeated=True,
    means="where",
)
SELECTED: Final = Option(
    "--selected",
    "VARIABLES",
    asking.selected,
    "only what is selected in a dashboard, as its address has it: var-agent=a&var-agent=b; of "
    "agents, models and reasons",
    is_repeated=True,
    means="where",
)
WINDOW: Final = (SINCE, UNTIL)
SELECTION: Final = (*WINDOW, WHERE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question: everything that is known of it stands in its record."""

    name: str
    help: str
    answer: Callable[..., Answer]
    """Gets the `Inquiry`, and the value of each of `options` by its name."""
    options: Sequence[Option] = ()
    selection: Sequence[Option] = (*SELECTION, SELECTED)
    """Options that choose which part of the ledger is asked."""
    tables: Mapping[str, Sequence[Column]] = field(default_factory=dict)
    """Columns of each table of the answer; those to group by come before them."""
    more: Mapping[str, Sequence[Column]] = field(default_factory=dict)
    """Further columns of a table, that only some options bring."""
    optional: frozenset[str] = frozenset()
    """Tables that some options leave out, or bring."""
    has_forecast: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    """A ledger to ask, and which part of it."""

    connection: Connection
    ledger: str
    """Its address, without a password."""
    address: Address
    waiting: Waiting
    """What is not in it yet, and is seen all the same."""
    selection: Selection
    work: ProgressBar
    has_charts: bool
    """False where the answer is shown without them, so that nobody asks for what they show."""

    @property
    def about(self) -> str:
        """Which part of which ledger was asked, in words."""
        parts = [f"ledger {self.ledger}"]
        if self.selection.since_us is not None:
            parts.append(f"since {written(self.selection.since_us, 'time')} UTC")
        if self.selection.until_us is not None:
            parts.append(f"until {written(self.selection.until_us, 'time')} UTC")
        parts += [f"{name} = {value}" for name, value in self.selection.where]
        # Times are written in UTC anyway, so that only another zone is worth a word.
        if str(self.selection.zone) != "UTC":
            parts.append(f"days of {self.selection.zone}")
        return ", ".join(parts)

    def key_columns(self, by: Iterable[str], others: Iterable[Column]) -> list[Column]:
        """Columns to group by; an audit key that is called like another column has its prefix."""
        from otel_limits.audit.answers import Column

        taken = {LEVEL, *(column.name for column in others)}
        names = [KEY_PREFIX + name if name in taken else name for name in by]
        return [Column(name, name, KEY_KINDS.get(name, "text"), is_key=True) for name in names]

    def require_known(self, by: Iterable[str] = ()) -> None:
        """Refuse to select or group by what no row has.

        Raises:
            LedgerError: One of the names is neither ours nor an audit key of this ledger.
        """
        from otel_limits.ledger.selection import audit_keys

        keys = audit_keys(self.connection)
        known = (*OWN_NAMES, *keys)
        names = (*by, *(name for name, _ in self.selection.where))
        # With the prefix, too: an audit key may be called like one of our own names.
        prefixed = {KEY_PREFIX + key for key in keys}
        unknown = [name for name in names if name not in known and name not in prefixed]
        # Refused and not answered with nothing: a misspelt name would look like a quiet month.
        if unknown:
            near = closest_match(unknown[0], known)
            hint = f"Did you mean {near}? " if near else ""
            raise LedgerError(
                f"The ledger has no {unknown[0]}. {hint}It has {', '.join(known)}; more are "
                f"recorded with OTEL_LIMITS_AUDIT_KEYS."
            )
