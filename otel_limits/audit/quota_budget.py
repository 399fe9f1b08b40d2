"""The question `budget`: the use of each quota of a policy file by the recorded calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit.answer import Answer, Column, Table
from otel_limits.audit.question import WINDOW, AuditQuery, Option, Question
from otel_limits.core.errors import LedgerError
from otel_limits.core.wording import pluralize
from otel_limits.ledger.rows import MICROSECONDS, dollars

if TYPE_CHECKING:
    from otel_limits.quotas.keys import Key
    from otel_limits.quotas.quota import Quota
    from otel_limits.quotas.store import Charge
    from otel_limits.quotas.windows import Window

COLUMNS: Final = (
    Column("quota", "Quota", "date", is_key=True),
    Column("key", "Key", "date", is_key=True),
    Column("since", "From", "time", is_key=True),
    Column("until", "Until", "time"),
    Column("used", "Used", "amount", is_key=True),
    Column("amount", "Amount", "amount", is_key=True),
    Column("unit", "Unit", "date", is_key=True),
    Column("used_share", "Used share", "share", is_key=True),
    Column("calls", "Calls", "count"),
    Column("unpriced_calls", "Unpriced calls", "count"),
)
"""Names, hashes and units are never shortened, like dates."""
NOT_RECORDED: Final = "(not recorded)"
"""Replaces a key that neither the audit keys nor the charges of a call contain."""
ALWAYS_RECORDED: Final = ("agent", "model")


@dataclass(frozen=True, slots=True)
class QuotaCall:
    """A model call, as quotas look at it."""

    started: float
    """Seconds since the epoch."""
    agent: str
    model: str
    invocation: str
    tokens: int
    pico: int | None
    charges: Mapping[str, Charge]
    """Its recorded charges, by quota."""
    attributes: Mapping[str, str]
    """Its audit keys."""

    def value(self, source: str) -> str | None:
        """Return the value of a source of keys; `None` if it is not recorded."""
        if source in ALWAYS_RECORDED:
            return self.agent if source == "agent" else self.model
        return self.attributes.get(audit_key_of(source))


@dataclass(slots=True)
class WindowUse:
    """Usage of one key in one window."""

    used: int = 0
    """In parts of the unit."""
    amount: int | None = None
    """`None` if it depends on something that is not recorded."""
    calls: int = 0
    unpriced: int = 0


@dataclass(slots=True)
class InvocationUse:
    """The calls of an invocation, which a quota of invocations counts once, in one window."""

    window: Window
    key: Key
    amount: int | None
    is_charged: bool
    """Whether a store counted it; otherwise its first call decides."""
    calls: Counter[Window] = field(default_factory=Counter)


@dataclass(slots=True)
class RecordedUse:
    """Usage of one quota by the recorded calls."""

    quota: Quota
    since: float | None
    """Start of its first window in seconds since the epoch; `None` for all."""
    until: float | None
    uses: dict[tuple[Window, Key], WindowUse] = field(default_factory=dict)
    invocations: dict[str, InvocationUse] = field(default_factory=dict)
    """By ID, if the quota counts them."""
    latest: Window | None = None
    doubtful_calls: int = 0
    """Calls of which it is not known whether the quota applies to them."""

    def add(self, call: QuotaCall) -> None:
        """Count a call if the quota applies to it."""
        charge = call.charges.get(self.quota.name)
        if charge is not None and charge.count.unit != self.quota.unit:
            charge = None
        window = self._window(call, charge)
        is_selected = self._is_selected(window)
        # An invocation of these windows may have been counted before them.
        counts_invocations = self.quota.unit == "invocations"
        if not is_selected and not counts_invocations:
            return
        applies = self._applies(call, charge)
        if applies is None and is_selected:
            self.doubtful_calls += 1
        if not applies:
            return
        key = self._key(call, charge)
        amount = self._amount(call, key)
        if counts_invocations:
            counted = InvocationUse(window, key, amount, is_charged=charge is not None)
            self._add_to(call.invocation, counted)
            return
        use = self._use(window, key, amount)
        use.calls += 1
        used = self._used(call, charge)
        use.unpriced += used is None
        use.used += used or 0

    def _add_to(self, invocation: str, use: InvocationUse) -> None:
        """Add a call to its invocation, given as if it was counted with this call."""
        counted = self.invocations.setdefault(invocation, use)
        # Of concurrent calls, the first that ends need not be the one that was counted.
        if use.is_charged and not counted.is_charged:
            use.calls = counted.calls
            counted = self.invocations[invocation] = use
        counted.calls[use.window] += 1

    def finish(self) -> None:
        """Count the invocations, when all of their calls are known."""
        for invocation in self.invocations.values():
            for window, calls in invocation.calls.items():
                if self._is_selected(window):
                    self._use(window, invocation.key, invocation.amount).calls += calls
            if self._is_selected(invocation.window):
                self._use(invocation.window, invocation.key, invocation.amount).used += 1
        self.invocations.clear()

    def _use(self, window: Window, key: Key, amount: int | None) -> WindowUse:
        use = self.uses.setdefault((window, key), WindowUse())
        use.amount = amount
        return use

    def _window(self, call: QuotaCall, charge: Charge | None) -> Window:
        """Return the window in which a call was admitted."""
        if charge is not None:
            window = self._window_at(charge.count.window.start)
            if window == charge.count.window:
                return window
        # Without a charge, or of another rule, or of a token bucket, which has no windows.
        return self._window_at(call.started)

    def _window_at(self, seconds: float) -> Window:
        # Calls are in their order, so most are in the window of the one before.
        if self.latest is None or seconds not in self.latest:
            self.latest = self.quota.windows.at(seconds)
        return self.latest

    def _is_selected(self, window: Window) -> bool:
        is_after = self.since is None or window.start >= self.since
        return is_after and (self.until is None or window.start < self.until)

    def _applies(self, call: QuotaCall, charge: Charge | None) -> bool | None:
        """Return whether the quota applies to a call; `None` if that is not recorded."""
        from otel_limits.quotas.keys import matches

        values = [(call.value(source), glob) for source, glob in self.quota.where]
        if any(value is not None and not matches(value, glob) for value, glob in values):
            return False
        is_known = all(value is not None for value, _ in values)
        return True if is_known or charge is not None else None

    def _key(self, call: QuotaCall, charge: Charge | None) -> Key:
        from otel_limits.quotas.keys import Key

        # An audit key may have come from elsewhere, e.g. from the agent around it.
        if charge is not None and any(
            source not in ALWAYS_RECORDED for source in self.quota.key.sources
        ):
            return Key(charge.count.key, charge.count.shown)
        return self._recorded_key(call) or Key("", NOT_RECORDED)

    def _recorded_key(self, call: QuotaCall) -> Key | None:
        template = self.quota.key
        is_recorded = all(
            source in ALWAYS_RECORDED or call.value(source) is not None
            for source in template.sources
        )
        return template.key(self.quota.name, call.value) if is_recorded else None

    def derived_key(self, call: QuotaCall) -> Key | None:
        """Return the key that follows from what else is recorded of a call; `None` if none does."""
        return self._recorded_key(call) if self._applies(call, None) else None

    def _amount(self, call: QuotaCall, key: Key) -> int | None:
        quota = self.quota
        is_by_plan = quota.plan and key.id not in quota.keys
        if not key.id or (is_by_plan and call.value(quota.plan) is None):
            return None
        return quota.amount_of(key, call.value)

    def _used(self, call: QuotaCall, charge: Charge | None) -> int | None:
        """Return the usage of a call in parts; `None` without a known price or bound."""
        from otel_limits.quotas.quota import parts_of_usd

        match self.quota.unit:
            case "tokens":
                return call.tokens
            case "model_calls":
                return 1
            case "invocations" | "concurrency":  # Not by call; a slot is free when its call ends.
                return 0
            case "usd":
                if charge is not None and charge.amount:
                    return charge.amount
                price = dollars(call.pico)
                return (None if call.tokens else 0) if price is None else parts_of_usd(price)


def budget(inquiry: AuditQuery, policy: str | None) -> Answer:
    """Answer what calls used of the quotas of a policy file.

    Raises:
        ConfigurationError: The file contains mistakes.
        LedgerError: It has no quotas with windows.
    """
    selection = inquiry.selection
    quotas = [
        RecordedUse(
            quota,
            _start_of_window(quota, selection.since_us),
            None if selection.until_us is None else selection.until_us / MICROSECONDS,
        )
        for quota in quotas_of(policy)
    ]
    for call in inquiry.work.through(calls_of(inquiry, quotas)):
        for each in quotas:
            each.add(call)
    for each in quotas:
        each.finish()
    title = "Use of quotas"
    return Answer(
        question="budget",
        title=title,
        about=inquiry.about,
        tables=[budget_table(quotas)],
        summary=" ".join(doubts(quotas)),
    )


def quotas_of(path: str | None) -> list[Quota]:
    """Return the quotas with windows of a policy file, by default of that of the environment.

    Raises:
        ConfigurationError: The file contains mistakes.
        LedgerError: It has no such quotas.
    """
    from otel_limits.settings.policy.file import valid_document

    quotas: list[Quota] = [entry.value for entry in valid_document(path).quotas.values()]
    with_windows = [each for each in quotas if each.unit != "concurrency"]
    if not with_windows:
        raise LedgerError(
            "No quotas with windows found. Name a policy file that has some, with --policy or "
            "OTEL_LIMITS_POLICY."
        )
    return with_windows


def calls_of(inquiry: AuditQuery, quotas: Iterable[RecordedUse]) -> Iterator[QuotaCall]:
    """Read the calls that may be in the windows of quotas."""
    from otel_limits.ledger.quota_usage import calls_since
    from otel_limits.quotas.recovery import decode_charges

    starts = [each.since for each in quotas]
    first = min((each for each in starts if each is not None), default=None)
    sources = {source for each in quotas for source in sources_of(each.quota)}
    keys = sorted({audit_key_of(each) for each in sources if each not in ALWAYS_RECORDED})
    found = calls_since(
        inquiry.connection,
        keys,
        None if None in starts else first,
        whole=any(each.quota.unit == "invocations" for each in quotas),
    )
    for row, values in found:
        charges = decode_charges(row.quota_charges) if row.quota_charges else ()
        yield QuotaCall(
            started=(row.at_us - (row.duration_us or 0)) / MICROSECONDS,
            agent=row.agent,
            model=row.model,
            invocation=row.invocation_id,
            tokens=row.input_tokens + row.output_tokens,
            pico=row.price_pico,
            charges={each.count.quota: each for each in charges},
            attributes={key: value for key, value in values.items() if value is not None},
        )


def sources_of(quota: Quota) -> Iterator[str]:
    """Yield the sources that decide about a quota: of its key, its conditions and its plan."""
    yield from quota.key.sources
    yield from (source for source, _ in quota.where)
    yield from filter(None, (quota.plan,))


def audit_key_of(source: str) -> str:
    """Return the audit key that records `baggage.NAME` or `attribute.NAME`."""
    return source.partition(".")[2]


def _start_of_window(quota: Quota, since_us: int | None) -> float | None:
    return None if since_us is None else quota.windows.at(since_us / MICROSECONDS).start


def budget_table(quotas: Iterable[RecordedUse]) -> Table:
    """Build a table with one row per quota, window and key, in the order of the file."""
    return Table(
        name="budget",
        title="Use of quotas by window",
        columns=COLUMNS,
        rows=[row for each in quotas for row in _rows(each)],
        note="Windows that the selected time touches are whole. Grants, resets and amounts that "
        "were set in the store are not included: see `otel-limits audit grants`. Neither are "
        "quotas of concurrent calls. Each process and each store has counted separately. A key "
        "that is not recorded needs OTEL_LIMITS_AUDIT_KEYS. Other keys are shown as by "
        "`otel-limits quotas`; `otel-limits audit whois` finds a name.",
    )


def _rows(of: RecordedUse) -> Iterator[tuple[Any, ...]]:
    from otel_limits.quotas.quota import in_unit, unit_name

    quota = of.quota
    unit = unit_name(quota.unit)

    def text(parts: int | None) -> str | None:
        # Never in scientific notation.
        return None if parts is None else f"{Decimal(in_unit(quota.unit, parts)):f}"

    if not of.uses:
        yield quota.name, None, None, None, "0", text(quota.amount), unit, 0.0, 0, 0
    in_order = sorted(of.uses.items(), key=lambda item: (item[0][0].start, -item[1].used))
    for (window, key), use in in_order:
        yield (
            quota.name,
            key.shown,
            window.start * MICROSECONDS,
            window.end * MICROSECONDS,
            text(use.used),
            text(use.amount),
            unit,
            use.used / use.amount if use.amount else None,
            use.calls,
            use.unpriced,
        )


def doubts(quotas: Iterable[RecordedUse]) -> Iterator[str]:
    """Describe the calls that the answer may lack."""
    for each in quotas:
        if each.doubtful_calls:
            calls = pluralize(each.doubtful_calls, "call is", "calls are")
            names = ",".join(
                audit_key_of(s) for s, _ in each.quota.where if s not in ALWAYS_RECORDED
            )
            yield (
                f"{calls} not counted for {each.quota.name}, since the ledger does not record "
                f"whether its where applies: record OTEL_LIMITS_AUDIT_KEYS={names}."
            )


BUDGET: Final = Question(
    name="budget",
    help="Show how much of each quota of a policy file the recorded calls used, by window.",
    answer=budget,
    tables={"budget": COLUMNS},
    options=(
        Option(
            "--policy",
            "FILE",
            str,
            "policy file with the quotas, of any version (default: OTEL_LIMITS_POLICY)",
        ),
    ),
    selection=WINDOW,
)
