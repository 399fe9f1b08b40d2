"""Use of quotas, window by window, as the calls of a ledger have it."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import baggage, context

from otel_limits import enable
from otel_limits.cli import main
from otel_limits.core.events import QuotaUse
from otel_limits.quotas.keys import Template
from otel_limits.quotas.recovery import encode_charges
from otel_limits.quotas.store import Charge, Count
from otel_limits.quotas.windows import Window
from otel_limits.testing import ScriptedModel, endless, says, uses
from tests.ledger.book import DAY, NINE, Call, Entry, write
from tests.price_list import listed

if TYPE_CHECKING:
    from pathlib import Path

    from otel_limits import Event
    from tests.conftest import MakeAgent
    from tests.ledger.fixtures import LedgerFile

Rows = dict[tuple[str, str | None, str | None], tuple[Any, ...]]


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A policy file."""
    return tmp_path / "limits.yaml"


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """The answer in JSON."""
    capsys.readouterr()
    assert main(["audit", "budget", *arguments, "--format", "json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_quotas_in_force_have_the_usage_of_their_store(
    ledger: LedgerFile,
    policy: Path,
    make_agent: MakeAgent,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    events: list[Event],
) -> None:
    """Exactly, by the same keys; refused calls use nothing."""
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    monkeypatch.setenv("OTEL_LIMITS_AUDIT_KEYS", "user")
    policy.write_text(
        """
        models: {"*": {price: {input: 1000, output: 2000}}}
        quotas:
          fleet: {tokens: 1000000, window: year}
          calls: {model_calls: 3, window: year, key: "{agent}/{baggage.user}"}
          runs: {invocations: 100, window: year}
          spend: {usd: 7, window: year, key: baggage.user, where: {baggage.user: "j*"}}
          names: {model_calls: 9, window: year, where: {baggage.user: "j*e"}}
          paced: {tokens: 999999, window: hour, pace: smooth, key: model}
          slots: {concurrency: 4}
        """
    )
    enable(observers=[events.append])
    for user in ("joe", "jane", "ann", "j\u3000" + "a" * 200 + "e"):
        token = context.attach(baggage.set_baggage("user", user))
        make_agent(ScriptedModel([uses("search"), says("x")]))("go")
        if user == "joe":
            make_agent(ScriptedModel(endless(uses("search"))))("go")
        context.detach(token)
    counted = {
        (each.quota, each.key): (Decimal(each.used), Decimal(each.limit))
        for each in events
        if isinstance(each, QuotaUse) and each.quota not in {"slots", "paced"}
    }
    rows = asked(capsys)["budget"]
    found = {(row["quota"], row["key"]): row for row in rows}
    assert {key for key in found if key[0] != "paced"} == set(counted)
    for key, expected in counted.items():
        assert (Decimal(found[key]["used"]), Decimal(found[key]["amount"])) == expected
    calls = [row for row in rows if row["quota"] == "calls"]
    assert sorted((row["used"], row["used_share"]) for row in calls) == [
        *[("2", 2 / 3)] * 3,
        ("3", 1.0),
    ]
    (paced,) = (row for row in rows if row["quota"] == "paced")
    assert paced["used"] == found["fleet", "(all)"]["used"] == str(ledger.tokens())


@listed
def test_quotas_of_any_file_are_applied_to_recorded_calls(
    ledger: LedgerFile, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the windows of its time zone, keys, plans and amounts, as far as they are recorded."""
    policy.write_text(
        """
        quotas:
          spend: {usd: 10, window: day, time_zone: Asia/Tokyo, key: agent}
          tokens:
            tokens: {gold: 1000, default: 500}
            window: month
            key: baggage.user
            plan: attribute.plan
            keys: {ann: 50}
          runs: {invocations: 2, window: PT1H, where: {model: "m*"}}
          secret: {model_calls: 5, window: day, where: {baggage.tenant: acme}}
          unused: {tokens: 9, window: hour, where: {agent: idle}}
        """
    )
    gold = {"user": "joe", "plan": "gold"}
    write(
        ledger.address,
        Entry(calls=[Call(price="2"), Call(price=None)], attributes=gold),
        Entry(calls=[Call(price="0.5")], attributes={"user": "ann"}),
        # At 18:00 in Berlin it is the next day in Tokyo.
        Entry(calls=[Call(price="3"), Call(model="other")], at=NINE + 9 * 3600, agent="b"),
        Entry(calls=[Call(price="3")], at=NINE + 30 * DAY, attributes=gold),
    )
    answer = asked(capsys, "--policy", str(policy))
    rows: Rows = {}
    for row in answer["budget"]:
        since = row["since"] and row["since"][:16]
        key = None if row["key"] and row["key"].startswith("#") else row["key"]
        share = row["used_share"] and round(row["used_share"], 3)
        facts = (row["used"], row["amount"], share, row["calls"], row["unpriced_calls"])
        rows.setdefault((row["quota"], key, since), ())
        rows[row["quota"], key, since] += (facts,)
    assert rows == {
        ("spend", "worker", "2025-10-08T15:00"): (("2.5", "10", 0.25, 3, 1),),
        ("spend", "b", "2025-10-09T15:00"): (("3", "10", 0.3, 2, 1),),
        ("spend", "worker", "2025-11-07T15:00"): (("3", "10", 0.3, 1, 0),),
        ("tokens", None, "2025-10-01T00:00"): (
            ("240", "1000", 0.24, 2, 0),
            ("120", "50", 2.4, 1, 0),
        ),
        ("tokens", "(not recorded)", "2025-10-01T00:00"): (("240", None, None, 2, 0),),
        ("tokens", None, "2025-11-01T00:00"): (("120", "1000", 0.12, 1, 0),),
        ("runs", "(all)", "2025-10-09T09:00"): (("2", "2", 1.0, 3, 0),),
        ("runs", "(all)", "2025-10-09T18:00"): (("1", "2", 0.5, 1, 0),),
        ("runs", "(all)", "2025-11-08T09:00"): (("1", "2", 0.5, 1, 0),),
        ("unused", None, None): (("0", "9", 0, 0, 0),),
        ("secret", None, None): (("0", "5", 0, 0, 0),),
    }
    assert answer["summary"] == (
        "6 calls are not counted for secret, since the ledger does not record whether its where "
        "applies: record OTEL_LIMITS_AUDIT_KEYS=tenant."
    )
    later = asked(capsys, "--policy", str(policy), "--since", "2025-11-08T12:00")["budget"]
    # The windows around that time are whole.
    assert [(row["quota"], row["used"]) for row in later if row["calls"]] == [
        ("spend", "3"),
        ("tokens", "120"),
    ]


def test_invocation_is_counted_once_in_the_window_and_key_of_its_first_call(
    ledger: LedgerFile, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if that window is not selected, and of concurrent calls if another one ends first."""
    policy.write_text("quotas: {runs: {invocations: 9, window: hour, key: baggage.user}}")
    nine = Window(int(NINE), int(NINE) + 3600)
    key = Template("baggage.user").key_of_text("runs", "ann")
    count = Count("runs", key.id, nine, "invocations", key.shown)
    charged = Call(charges=encode_charges([Charge(count=count, amount=1)]))
    # Their fourth call begins at ten o'clock.
    begin = NINE + 3600 - 3
    write(
        ledger.address,
        Entry(calls=[Call()] * 4, at=begin, attributes={"user": "joe"}),
        Entry(calls=[Call(), charged, Call(), Call()], at=begin),
        Entry(calls=[Call()] * 4, at=begin),
    )

    def rows(*options: str) -> set[tuple[Any, ...]]:
        answer = asked(capsys, "--policy", str(policy), *options)["budget"]
        return {(row["key"], row["since"][11:16], row["used"], row["calls"]) for row in answer}

    joe = Template("baggage.user").key_of_text("runs", "joe").shown
    of_ten = {(each, "10:00", "0", 1) for each in (joe, key.shown, "(not recorded)")}
    of_nine = {(each, "09:00", "1", 3) for each in (joe, key.shown, "(not recorded)")}
    assert rows() == of_nine | of_ten
    assert rows("--since", "2025-10-09T10:30") == of_ten
    assert rows("--until", "2025-10-09T10:00") == of_nine


def test_amounts_outside_the_ledger_are_named(
    ledger: LedgerFile, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Grants and amounts set in the store; a file without quotas, or with mistakes, is refused."""
    write(ledger.address, Entry())
    policy.write_text("quotas: {q: {tokens: 9, window: day}}")
    assert main(["audit", "budget", "--policy", str(policy)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Grants, resets and amounts that were set in the store are not included" in text
    for content, error in (
        ("defaults: {}", "No quotas with windows found"),
        ("quotas: {q: {tokens: -9}}", "limits.yaml:1"),
    ):
        policy.write_text(content)
        assert main(["audit", "budget", "--policy", str(policy)]) == 2
        assert error in capsys.readouterr().err
