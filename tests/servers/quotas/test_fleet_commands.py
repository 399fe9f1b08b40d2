"""Fleet commands as typed by an operator, and the kills that they publish."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from datetime import datetime, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from strands import tool

import otel_limits
from otel_limits import cli
from otel_limits.core.events import QuotaGrant, QuotaUse, Stop
from otel_limits.quotas import kill_listener
from otel_limits.quotas.conversation_sync import parts_of
from otel_limits.quotas.keys import Template
from otel_limits.quotas.redis_scripts import KeyNames
from otel_limits.quotas.store import (
    Charge,
    Count,
    CountConversation,
    Demand,
    Operation,
    Reserve,
    Settle,
    SharedStore,
)
from otel_limits.quotas.windows import Windows
from otel_limits.runs.conversations import ConversationSums
from otel_limits.runs.registry import LIVE
from otel_limits.testing import ScriptedModel, endless, says, uses
from tests.quotas.fixtures import PATIENCE, eventually
from tests.servers.quotas.test_fleet import WORKER, process
from tests.unit.agents.test_quotas import carrying

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable
    from pathlib import Path

    from otel_limits.core.events import Event
    from tests.conftest import MakeAgent, Metric
    from tests.ledger.fixtures import LedgerFile
    from tests.quotas.fixtures import Hold, Server

QUOTAS: dict[str, dict[str, Any]] = {
    "daily": {"model_calls": 2, "window": "month"},
    "tenants": {"tokens": 1000, "window": "day", "key": "{agent}/{baggage.tenant.id}"},
    "nightly": {"usd": 20, "window": "hour", "where": {"agent": "nightly-*"}},
}
MODELS = {"*": {"price": {"input": 1, "output": 1}}}

Run = Any


@pytest.fixture
def used(hold: Hold, make_agent: MakeAgent, server: Server, events: list[Event]) -> Any:
    """An agent that used its quotas twice, once for acme and once without a tenant."""
    hold(QUOTAS, server.url, [events.append], models=MODELS)
    model = ScriptedModel(endless(says("done")))
    model.update_config(max_tokens=5)
    agent = make_agent(model, name="writer", tools=[])
    with carrying(tenant__id="acme"):
        agent("go")
    agent("go")
    return agent


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command: its exit status and output."""

    def type_in(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(arguments)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return type_in


# --- quotas ---------------------------------------------------------------------------------------


def test_quotas_command_shows_remaining_and_reset_time(used: Any, run: Run) -> None:
    """Every used key has a row, and so does an unused quota."""
    status, out, _ = run("quotas", "--format", "json")
    levels = json.loads(out)["quotas"]
    assert status == 0
    assert [(each["quota"], each["used"], each["remaining"]) for each in levels] == [
        ("daily", 2, 0),
        ("tenants", 15, 985),
        ("tenants", 15, 985),
        ("nightly", "0", "20"),
    ]
    assert {each["resets"][10:] for each in levels[:3]} == {"T00:00:00Z"}
    shown = sorted(each["key"] for each in levels)
    assert shown[0] == shown[1] == "(all)"
    assert shown[2].startswith("writer/#")
    assert shown[3] == "writer/(missing)"


def test_quotas_table_matches_the_json(used: Any, run: Run) -> None:
    """The default format is for people."""
    _, out, _ = run("quotas")
    (daily,) = (line.split() for line in out.splitlines() if line.startswith("daily"))
    assert daily[:8] == ["daily", "(all)", "2", "0", "0", "2", "model", "calls"]
    assert "acme" not in out


def test_quotas_command_shows_reserved_usage(
    hold: Hold, make_agent: MakeAgent, server: Server, run: Run
) -> None:
    """During an in-flight call."""
    hold(QUOTAS, server.url, models=MODELS)
    seen: list[Any] = []

    class Looking(ScriptedModel):
        async def stream(self, *arguments: Any, **more: Any) -> AsyncIterable[Any]:
            seen.append(json.loads(run("quotas", "--format", "json")[1])["quotas"][0])
            async for event in super().stream(*arguments, **more):
                yield event

    model = Looking([says("done")])
    model.update_config(max_tokens=5)
    make_agent(model)("go")
    assert (seen[0]["used"], seen[0]["reserved"], seen[0]["remaining"]) == (0, 1, 1)


USERS = 2_500


@pytest.fixture
def many_keys(hold: Hold, server: Server, store: SharedStore) -> None:
    """A quota with many users, of whom user n has used n of 10,000 tokens."""
    quota = {"tokens": 10_000, "window": "month", "key": "agent"}
    hold({"users": quota}, server.url)
    template, window = Template("agent"), Windows("month").at(store.now())
    operations: list[Operation] = []
    for number in range(USERS):
        key = template.key("users", {"agent": f"user-{number}"}.get)
        count = Count("users", key.id, window, "tokens", key.shown)
        demand = Demand(count=count, amount=number, limit=10_000)
        operations += [
            Reserve(f"r{number}", (demand,), 60),
            Settle(f"r{number}", (Charge(count=count, amount=number),)),
        ]
    for first in range(0, len(operations), 500):
        store.run(operations[first : first + 500])


@pytest.mark.usefixtures("many_keys")
def test_keys_with_the_highest_utilization_are_shown_first(run: Run) -> None:
    """Of many thousands; the number of hidden keys is printed."""
    shown = json.loads(run("quotas", "--top", "3", "--format", "json")[1])["quotas"]
    assert [each["key"] for each in shown] == ["user-2499", "user-2498", "user-2497"]
    assert "2,497 more keys not shown" in run("quotas", "--top", "3")[1]


@pytest.mark.usefixtures("many_keys")
def test_keys_are_chosen_by_a_glob(run: Run) -> None:
    """Matched against the keys as shown in the table."""
    shown = json.loads(run("quotas", "--key", "user-249*", "--format", "json")[1])["quotas"]
    assert sorted(each["used"] for each in shown) == [249, *range(2490, 2500)]


@pytest.mark.usefixtures("many_keys")
def test_listing_many_keys_reads_each_of_them_once(run: Run, server: Server) -> None:
    """The server is never blocked for more than 200 of them."""
    server.client.config_resetstat()
    assert len(json.loads(run("quotas", "--format", "json")[1])["quotas"]) == USERS
    # Each batch checks once for grants. New connections and heartbeats run scripts too, but read
    # no keys of a quota.
    assert server.calls("exists") == -(-USERS // 200)


DAMAGED = {
    "index": ("tenants:index", "quota 'tenants'", ["daily", "nightly"]),
    "count": ("daily:*:model_calls", "quota 'daily'", ["tenants", "tenants", "nightly"]),
    "one of two counts": ("tenants:*:tokens", "quota 'tenants'", ["daily", "tenants", "nightly"]),
    "conversations": (
        "conversations", "conversations", ["daily", "tenants", "tenants", "nightly"],
    ),
    "calls of killed workers": (
        "expired", "calls of killed workers", ["daily", "tenants", "tenants", "nightly"],
    ),
}  # fmt: skip
"""Which key another program overwrote, what is named with it, and the quotas that are shown."""


@pytest.mark.parametrize("damage", DAMAGED)
def test_quotas_command_shows_the_others_if_a_key_is_damaged(
    used: Any,
    run: Run,
    server: Server,
    ledger: LedgerFile,
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
) -> None:
    """The operator reads which key to rename."""
    pattern, subject, quotas = DAMAGED[damage]
    monkeypatch.setenv("OTEL_LIMITS_CONVERSATION_MAX_TURNS", "5")
    name = KeyNames().tag + ":" + pattern
    key = next(iter(server.client.keys(name)), name)
    server.client.delete(key)
    server.client.set(key, "of another program")
    status, out, told = run("quotas", "--format", "json")
    assert (status, [row["quota"] for row in json.loads(out)["quotas"]]) == (1, quotas)
    assert told == (
        f"otel-limits: {subject}: data of another program is under the key {key!r} of the quota "
        "store; rename that key.\n"
    )


@pytest.mark.usefixtures("used")
def test_watch_redraws_until_interrupted(run: Run) -> None:
    """An interrupt is not an error."""
    command = [sys.executable, "-m", "otel_limits.cli", "quotas", "--watch", "--format", "json"]
    code = "import sys; from otel_limits.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *command[3:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())["quotas"]
        assert first[0]["limit"] == 2
        run("quotas", "grant", "daily", "1", "--until", "2999-01-01")
        while json.loads(watching.stdout.readline())["quotas"][0]["limit"] == 2:
            pass
        watching.send_signal(signal.SIGINT)
        assert watching.wait() == 0


def test_namespaces_on_one_server_are_independent(
    hold: Hold,
    make_agent: MakeAgent,
    server: Server,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Counts, grants and kills of staging do not affect production."""
    hold({"daily": {"model_calls": 1, "window": "month"}}, server.url)
    eventually(listening(server))
    agent = make_agent(ScriptedModel(endless(says("done"))))
    monkeypatch.setenv("OTEL_LIMITS_QUOTA_NAMESPACE", "staging")
    run("quotas", "grant", "daily", "5", "--until", "2999-01-01")
    status, _, told = run("kill", "--agent", "*")
    assert status == 1
    assert told.startswith("otel-limits: Sent kill for")
    assert "to 0 processes" in told
    assert "OTEL_LIMITS_QUOTA_NAMESPACE" in told
    assert [agent("go").stop_reason for _ in range(2)] == ["end_turn", "quota_exceeded"]
    (row,) = json.loads(run("quotas", "--format", "json")[1])["quotas"]
    assert (row["used"], row["limit"]) == (0, 6)
    otel_limits.enable()
    assert [agent("go").stop_reason for _ in range(2)] == ["end_turn", "end_turn"]
    assert "received kill" not in caplog.text


# --- reset and grant ------------------------------------------------------------------------------


def test_grant_admits_more_calls_until_it_expires(used: Any, run: Run, events: list[Event]) -> None:
    """It is published as an event, with its author."""
    assert used("go").stop_reason == "quota_exceeded"
    status, out, _ = run("quotas", "grant", "daily", "1", "--until", "2999-12-31T23:00+01:00")
    assert (status, out.splitlines()[0]) == (
        0,
        "Raised the limit of (all) in quota 'daily' by 1 model call until 2999-12-31T22:00:00Z.",
    )
    assert [used("go").stop_reason for _ in range(2)] == ["end_turn", "quota_exceeded"]
    (grant,) = (fact for fact in events if isinstance(fact, QuotaGrant))
    assert (grant.quota, grant.change, grant.amount, grant.unit) == (
        "daily",
        "grant",
        1,
        "model calls",
    )
    assert grant.until == 32_503_672_800
    assert "@" in grant.by


CHANGES_OF_DAMAGED: dict[str, tuple[str, list[str]]] = {
    "reset, count": ("{count}", ["quotas", "reset", "daily"]),
    "reset, leases": ("{count}:leases", ["quotas", "reset", "daily"]),
    "grant": ("{key}:grants", ["quotas", "grant", "daily", "1", "--until", "1d"]),
    "unblock": ("{key}:grants", ["quotas", "unblock", "daily"]),
    "kill": ("{tag}:kills", ["kill", "--agent", "writer"]),
}
"""The key that another program overwrote, and a command that changes it."""


@pytest.mark.parametrize("damage", CHANGES_OF_DAMAGED)
def test_change_of_a_damaged_key_names_it(used: Any, run: Run, server: Server, damage: str) -> None:
    """The store is available: the operator has to rename the key."""
    name, command = CHANGES_OF_DAMAGED[damage]
    tag = KeyNames().tag
    (count,) = server.client.keys(f"{tag}:daily:*:model_calls")
    name = name.format(tag=tag, count=count, key=":".join(count.split(":")[:-2]))
    server.client.delete(name)
    server.client.set(name, "of another program")
    status, out, told = run(*command)
    assert (status, out) == (1, "")
    assert told == (
        f"otel-limits: data of another program is under the key {name!r} of the quota store; "
        "rename that key.\n"
    )


def test_change_by_a_user_without_a_name_is_recorded(
    used: Any, run: Run, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may run with a user ID that has no name."""
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    status, _, _ = run("quotas", "grant", "daily", "1", "--until", "2999-12-31")
    assert status == 0
    (grant,) = (fact for fact in events if isinstance(fact, QuotaGrant))
    assert grant.by == f"{os.getuid()}@{socket.gethostname()}"


def test_a_reset_counts_from_0_again(used: Any, run: Run, events: list[Event]) -> None:
    """It is published too, and every process continues from 0."""
    status, out, _ = run("quotas", "reset", "daily")
    assert (status, out.splitlines()[0]) == (0, "Reset (all) of quota 'daily'.")
    assert [used("go").stop_reason for _ in range(3)] == ["end_turn", "end_turn", "quota_exceeded"]
    (reset,) = (fact for fact in events if isinstance(fact, QuotaGrant))
    assert (reset.change, reset.amount, reset.until) == ("reset", 0, None)


def test_grant_and_reset_are_recorded_in_the_ledger(
    used: Any, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With author, amount and expiry; a reset as well."""
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", str(tmp_path / "ledger.db"))
    run("quotas", "grant", "nightly", "0.005", "--until", "2999-01-01")
    run("quotas", "reset", "daily")
    status, out, _ = run("audit", "grants", "--format", "json")
    grant, reset = json.loads(out)["grants"]
    assert status == 0
    assert (grant["quota"], grant["change"], grant["amount"], grant["unit"]) == (
        "nightly",
        "grant",
        "0.005",
        "USD",
    )
    assert grant["until"].startswith("2999-01-01T00:00:00")
    assert "@" in grant["by"]
    assert (reset["quota"], reset["change"], reset["amount"]) == ("daily", "reset", None)


DATABASE = "postgresql://joe:secret@127.0.0.1:1/db"
SPILLED = "Recorded in a spill file, which the next process that writes to the ledger"

RECORDED = {
    "default": ("data", "", "Recorded in the ledger {path}/data/otel-limits/ledger.db."),
    "none": ("data", "none", "Not recorded: OTEL_LIMITS_LEDGER is none."),
    "unavailable": (
        "data",
        DATABASE,
        f"{SPILLED} postgresql+psycopg://joe:***@127.0.0.1:1/db imports.",
    ),
    "unwritable": (
        "file/data",
        "{path}/file/ledger.db",
        "Not recorded: neither the ledger {path}/file/ledger.db nor a spill file is writable.",
    ),
}
"""The directory of spill files and OTEL_LIMITS_LEDGER, and where a change is recorded."""


@pytest.mark.usefixtures("used", "faulty")
@pytest.mark.parametrize("case", RECORDED)
def test_change_prints_where_it_is_recorded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The change itself is made in each case, and only an operator can note it elsewhere."""
    directory, ledger, sentence = RECORDED[case]
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / directory))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / directory))
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", ledger.format(path=tmp_path))
    status, out, _ = run("quotas", "reset", "daily")
    assert (status, out.splitlines()) == (
        0,
        ["Reset (all) of quota 'daily'.", sentence.format(path=tmp_path)],
    )


def test_change_is_refused_when_its_ledger_is_unusable(
    used: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every change must be auditable."""
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", "mysql://somewhere/else")
    status, _, err = run("quotas", "reset", "daily")
    assert status == 2
    assert "OTEL_LIMITS_LEDGER" in err
    assert used("go").stop_reason == "quota_exceeded"


@pytest.mark.parametrize("written", ["writer/acme", "as shown"])
def test_a_key_is_written_as_it_is_or_as_it_is_shown(
    used: Any, run: Run, events: list[Event], written: str
) -> None:
    """Only that key is changed."""
    shown = next(fact.key for fact in events if isinstance(fact, QuotaUse) and "#" in fact.key)
    key = shown if written == "as shown" else written
    assert run("quotas", "reset", "tenants", key)[0] == 0
    levels = json.loads(run("quotas", "--format", "json")[1])["quotas"]
    assert {each["key"]: each["used"] for each in levels if each["quota"] == "tenants"} == {
        shown: 0,
        "writer/(missing)": 15,
    }


def test_money_is_granted_in_dollars(used: Any, run: Run) -> None:
    """Down to fractions of a cent."""
    run("quotas", "grant", "nightly", "0.005", "--until", "2999-01-01")
    levels = json.loads(run("quotas", "--format", "json")[1])["quotas"]
    assert levels[-1]["limit"] == "20.005"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("reset", "weekly"), "No quota named 'weekly'. Known quotas: daily, tenants, nightly."),
        (("reset", "daily", "acme"), "Quota 'daily' has no keys"),
        (("reset", "tenants", "acme"), "look like '{agent}/{baggage.tenant.id}', got 'acme'"),
        (
            ("grant", "daily", "0", "--until", "2999-01-01"),
            "AMOUNT (in model calls) must be a whol",
        ),
        (("grant", "daily", "1.5", "--until", "2999-01-01"), "AMOUNT (in model calls) must be a w"),
        (
            ("grant", "daily", "x", "--until", "2999-01-01"),
            "AMOUNT (in model calls) must be a whol",
        ),
        (("grant", "daily", "1e99", "--until", "2999-01-01"), "whole number from 1 to 90071992547"),
        (("grant", "nightly", "inf", "--until", "2999-01-01"), "AMOUNT (in USD) must be an amo"),
        (("grant", "nightly", "9007200", "--until", "2999-01-01"), "above 0 and up to 9007199, su"),
        (("grant", "daily", "1", "--until", "tomorrow"), "--until must be a time: 1d for a d"),
        (("grant", "daily", "1", "--until", "2020-01-01"), "--until must be in the future"),
    ],
)
def test_a_mistake_is_a_sentence_and_changes_nothing(
    used: Any, run: Run, events: list[Event], arguments: tuple[str, ...], sentence: str
) -> None:
    """The exit status is 2."""
    status, out, err = run("quotas", *arguments)
    assert (status, out) == (2, "")
    assert sentence in err
    assert not [fact for fact in events if isinstance(fact, QuotaGrant)]


def test_a_grant_can_end_after_a_duration(used: Any, run: Run, events: list[Event]) -> None:
    """Which `audit --since 1d` counts back from now."""
    before = time.time()
    assert run("quotas", "grant", "daily", "1", "--until", "1d")[0] == 0
    (grant,) = [fact for fact in events if isinstance(fact, QuotaGrant)]
    assert grant.until is not None
    assert before + 86_400 <= grant.until <= time.time() + 86_400


def test_the_policy_file_can_be_an_option(
    used: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after the name of a command, as with `check`."""
    path = os.environ["OTEL_LIMITS_POLICY"]
    monkeypatch.delenv("OTEL_LIMITS_POLICY")
    assert "daily" in run("quotas", "--policy", path)[1]
    for words in (("--policy", path, "reset", "daily"), ("reset", "daily", "--policy", path)):
        status, out, _ = run("quotas", *words)
        assert (status, out.splitlines()[0]) == (0, "Reset (all) of quota 'daily'.")


def test_without_a_policy_there_is_nothing_to_show(
    run: Run, monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    """The message names the setting."""
    monkeypatch.setenv("OTEL_LIMITS_QUOTA_STORE", server.url)
    assert run("quotas") == (
        2,
        "",
        (
            "otel-limits: No quotas found. Set OTEL_LIMITS_POLICY, or --policy, to a policy file "
            "with quotas.\n"
        ),
    )


def test_a_policy_with_a_mistake_is_not_shown(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its error is."""
    path = tmp_path / "limits.yaml"
    path.write_text("quotas: {q: {tokens: 5}}")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))
    status, _, err = run("quotas")
    assert status == 2
    assert 'limits.yaml:1: quotas["q"] must have a window' in err


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("quotas",), "Quotas are kept in process memory"),
        (("kill", "--agent", "x"), "Kills are sent through the quota store"),
    ],
)
def test_without_a_shared_store_nothing_can_be_seen_from_outside(
    hold: Hold, run: Run, command: tuple[str, ...], why: str
) -> None:
    """The message gives the reason and the setting."""
    hold(QUOTAS, models=MODELS)
    status, _, err = run(*command)
    assert status == 2
    assert why in err
    assert "Set OTEL_LIMITS_QUOTA_STORE" in err


def test_quotas_command_reports_an_unreachable_store(
    hold: Hold, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With exit status 1."""
    hold(QUOTAS, models=MODELS)
    monkeypatch.setenv("OTEL_LIMITS_QUOTA_STORE", "redis://127.0.0.1:1/0")
    status, _, err = run("quotas")
    assert status == 1
    assert err.startswith("otel-limits: quota store unavailable (")


# --- revoke, block, unblock -----------------------------------------------------------------------


def test_revoke_removes_a_grant(used: Any, run: Run) -> None:
    """The quota is back to the limit of its policy."""
    run("quotas", "grant", "daily", "5", "--until", "2999-01-01")
    assert used("go").stop_reason == "end_turn"
    status, out, _ = run("quotas", "revoke", "daily")
    assert (status, out.splitlines()[0]) == (0, "Revoked 1 grant of (all) in quota 'daily'.")
    assert used("go").stop_reason == "quota_exceeded"
    status, _, said = run("quotas", "revoke", "daily")
    assert status == 2
    assert said == "otel-limits: (all) of quota 'daily' has no active grants.\n"


def test_a_grant_to_a_key_that_was_never_used_is_listed(used: Any, run: Run) -> None:
    """With its amount."""
    run("quotas", "grant", "tenants", "writer/globex", "500", "--until", "2999-01-01")
    rows = json.loads(run("quotas", "--format", "json")[1])["quotas"]
    assert [each["used"] for each in rows if each["limit"] == 1500] == [0]


def test_block_applies_to_the_key_of_the_agent_and_is_otherwise_refused(
    used: Any, run: Run
) -> None:
    """The name of the agent contains the separator of the key."""
    used.name = "team/writer"
    status, _, err = run("quotas", "block", "tenants", "team/writer/acme")
    assert status == 2
    assert "can be several keys of quota 'tenants': team/#" in err
    assert "None is in use." in err
    run("quotas", "reset", "daily")
    with carrying(tenant__id="acme"):
        used("go")
        assert run("quotas", "block", "tenants", "team/writer/acme")[0] == 0
        assert used("go").stop_reason == "quota_exceeded"
    status, _, err = run("quotas", "block", "tenants", "writer/" + "x" * 200)
    assert status == 2
    assert "a value has 200 characters, more than 128. Calls with such a value count as" in err


def test_blocked_key_is_refused_with_its_reason(used: Any, run: Run) -> None:
    """Other keys are unaffected, and unblocking restores it."""
    arguments = ("tenants", "writer/acme")
    status, out, _ = run("quotas", "block", *arguments, "--reason", "unpaid, = since 1 October")
    assert status == 0
    assert "acme" not in out
    run("quotas", "reset", "daily")
    with carrying(tenant__id="acme"):
        result = used("go")
    assert result.stop_reason == "quota_exceeded"
    stop = otel_limits.stop_of(result)
    assert stop is not None
    assert "until it is unblocked: unpaid, = since 1 October" in stop.sentence
    assert stop.quota is not None
    assert stop.quota.retry_after_seconds is None
    unblock = f"`otel-limits quotas unblock tenants '{stop.quota.key}'`."
    assert f" Unblock it with {unblock}" in stop.sentence
    assert used("go").stop_reason == "end_turn"
    rows = json.loads(run("quotas", "--format", "json")[1])["quotas"]
    assert [each["remaining"] for each in rows if each["blocked"] is not None] == [0]
    shown = " ".join(run("quotas")[1].split())
    assert "Block reason" in shown
    assert " blocked unpaid, = since 1 October" in shown
    assert run("quotas", "unblock", "tenants", stop.quota.key)[0] == 0
    with carrying(tenant__id="acme"):
        assert used("go").stop_reason == "end_turn"
    assert run("quotas", "unblock", *arguments)[0] == 2


def test_blocked_key_leaves_no_last_answer(
    hold: Hold, make_agent: MakeAgent, server: Server, run: Run
) -> None:
    """No call is sent, also if the agent has something to sum up."""
    hold({"daily": {"model_calls": 9, "window": "day"}}, server.url, defaults={"action": "wrap_up"})

    @tool
    def search() -> str:
        """Block the quota, as an operator does."""
        return str(run("quotas", "block", "daily"))

    model = ScriptedModel(endless(uses("search")))
    result = make_agent(model, tools=[search])("go")
    assert (result.stop_reason, model.calls) == ("quota_exceeded", 1)
    stop = otel_limits.stop_of(result)
    assert stop is not None
    assert "No final answer was requested: a blocked quota admits no call." in stop.sentence


def test_block_with_a_duration_expires(used: Any, run: Run, server: Server) -> None:
    """At the given time, by the server's clock."""
    run("quotas", "reset", "daily")
    run("quotas", "block", "daily", "--until", "2999-01-01")
    stop = otel_limits.stop_of(used("go"))
    assert stop is not None
    assert stop.quota is not None
    until = datetime(2999, 1, 1, tzinfo=timezone.utc).timestamp()
    assert stop.quota.retry_after_seconds == pytest.approx(until - time.time(), abs=60)
    (grants,) = server.client.keys("*:daily:*:grants")
    (member,) = server.client.zrange(grants, 0, -1)
    server.client.zadd(grants, {member: 1})
    assert used("go").stop_reason == "end_turn"


def test_every_change_is_in_the_ledger(
    used: Any, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its author and reason."""
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", str(tmp_path / "ledger.db"))
    run("quotas", "block", "daily", "--until", "2999-01-01", "--reason", "abuse")
    run("quotas", "unblock", "daily")
    run("quotas", "grant", "daily", "5", "--until", "2999-01-01")
    run("quotas", "revoke", "daily")
    answer = json.loads(run("audit", "grants", "--format", "json")[1])
    assert [(each["change"], each["reason"]) for each in answer["grants"]] == [
        ("block", "abuse"),
        ("unblock", None),
        ("grant", None),
        ("revoke", None),
    ]


# --- kill -----------------------------------------------------------------------------------------


class Endless(ScriptedModel):
    """A model whose answer never ends."""

    def __init__(self) -> None:
        super().__init__([])
        self.began = asyncio.Event()

    async def stream(self, *_: Any, **__: Any) -> AsyncIterable[Any]:
        """Stream words."""
        yield {"messageStart": {"role": "assistant"}}
        yield {"contentBlockStart": {"start": {}}}
        self.began.set()
        while True:
            yield {"contentBlockDelta": {"delta": {"text": "word "}}}
            await asyncio.sleep(0.01)


def listening(server: Server, processes: int = 1) -> Callable[[], bool]:
    """Return whether that many processes are subscribed."""
    return lambda: server.client.pubsub_numsub("{otel_limits}:kill:0")[0][1] >= processes


def test_kill_ends_active_invocations_of_matching_agents(
    hold: Hold, make_agent: MakeAgent, server: Server, run: Run, events: list[Event]
) -> None:
    """A streaming response is cut off; other agents continue."""
    hold({}, server.url, [events.append])
    eventually(listening(server))

    async def invoke() -> list[str]:
        models = [Endless(), Endless()]
        agents = [make_agent(model, name=f"research-{n}") for n, model in enumerate(models)]
        other = make_agent(ScriptedModel([says("done")]), name="writer")
        tasks = [asyncio.create_task(agent.invoke_async("go")) for agent in agents]
        for model in models:
            await model.began.wait()
        told = await asyncio.to_thread(run, "kill", "--agent", "research-*")
        assert told == (0, "Sent kill for 'research-*' to 1 process.\n", "")
        results = await asyncio.gather(*tasks, other.invoke_async("go"))
        return [result.stop_reason for result in results]

    assert asyncio.run(invoke()) == ["killed", "killed", "end_turn"]
    assert [fact.reason for fact in events if isinstance(fact, Stop)].count("killed") == 2


def test_malformed_kill_message_ends_nothing(
    hold: Hold, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any client that may publish on the channel can send one."""
    received: list[tuple[str, float]] = []

    def kill(*, agent: str, before: float) -> int:
        received.append((agent, before))
        return 0

    monkeypatch.setattr(LIVE, "kill", kill)
    hold({}, server.url)
    eventually(listening(server))
    server.client.publish("{otel_limits}:kill:0", "no-order")
    server.client.publish("{otel_limits}:kill:0", "0123 research-*")
    eventually(lambda: received[-1:] == [("research-*", -math.inf)])


def test_a_kill_leaves_the_next_invocation_alone(
    hold: Hold,
    make_agent: MakeAgent,
    server: Server,
    run: Run,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also in a process that subscribes later."""
    hold({}, server.url)
    eventually(listening(server))
    run("kill", "--agent", "*")
    eventually(lambda: "received kill for" in caplog.text)
    agent = make_agent(ScriptedModel(endless(says("done"))))
    assert agent("go").stop_reason == "end_turn"
    otel_limits.disable()
    hold({}, server.url)
    eventually(listening(server))
    assert agent("go").stop_reason == "end_turn"


def test_kill_sent_while_disconnected_arrives_on_reconnect(
    hold: Hold, server: Server, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly once."""
    received: list[str] = []

    def kill(*, agent: str, before: float) -> int:
        received.append(agent)
        return 0

    monkeypatch.setattr(LIVE, "kill", kill)
    hold({}, server.url)
    eventually(listening(server))
    server.client.client_kill_filter(_type="pubsub")
    run("kill", "--agent", "research-*")
    eventually(lambda: received == ["research-*"])
    eventually(listening(server))
    server.client.client_kill_filter(_type="pubsub")
    run("kill", "--agent", "another")
    eventually(lambda: received == ["research-*", "another"])


def test_late_kill_spares_invocations_started_after_it(
    hold: Hold, make_agent: MakeAgent, server: Server, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that was disconnected ends only invocations that started before the kill."""
    hold({}, server.url)
    eventually(listening(server))

    async def invoke() -> list[str]:
        models = [Endless(), Endless()]
        agents = [make_agent(model, name=f"research-{n}") for n, model in enumerate(models)]
        first = asyncio.create_task(agents[0].invoke_async("go"))
        await models[0].began.wait()
        server.client.client_kill_filter(_type="pubsub")
        run("kill", "--agent", "research-*")
        second = asyncio.create_task(agents[1].invoke_async("go"))
        await models[1].began.wait()
        reasons = [(await first).stop_reason]
        await asyncio.to_thread(eventually, lambda: "1 invocation halted" in caplog.text)
        otel_limits.kill(agent="research-1")
        return [*reasons, (await second).stop_reason]

    assert asyncio.run(invoke()) == ["killed", "killed"]
    assert "received kill for agents matching 'research-*': 1 invocation halted." in caplog.text


def test_unpublished_kill_is_found_at_the_next_reservation(
    hold: Hold, make_agent: MakeAgent, server: Server
) -> None:
    """A published message can be lost, for example by a proxy; the stored one is read then."""
    hold({"calls": {"model_calls": 10, "window": "P366D"}}, server.url)
    eventually(listening(server))

    async def invoke() -> str:
        model = Endless()
        task = asyncio.create_task(make_agent(model, name="research").invoke_async("go"))
        await model.began.wait()
        seconds, micros = server.client.time()
        order = f"id@{seconds}{micros:06} research"
        server.client.zadd(KeyNames().kills, {order: seconds * 1000 + micros // 1000})
        await make_agent(ScriptedModel([says("done")]), name="other").invoke_async("go")
        return (await task).stop_reason

    assert asyncio.run(invoke()) == "killed"


def test_process_denied_subscribing_polls_for_kills(
    hold: Hold,
    make_agent: MakeAgent,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    metric: Metric,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The kill still arrives, and the denial is logged once."""
    rights = ("on", ">hunter2", "~*", "resetchannels", "+@all")
    server.client.execute_command("ACL", "SETUSER", "deaf", *rights)
    faults = ("otel_limits_internal_errors_total", {"component": "kill"})
    before = metric(faults[0], **faults[1])
    hold({}, server.url.replace("redis://", "redis://deaf:hunter2@"))
    eventually(lambda: "cannot subscribe to kills" in caplog.text)
    monkeypatch.setenv("OTEL_LIMITS_QUOTA_STORE", server.url)

    async def invoke() -> str:
        model = Endless()
        task = asyncio.create_task(make_agent(model, name="research").invoke_async("go"))
        await model.began.wait()
        await asyncio.to_thread(cli.main, ["kill", "--agent", "research"])
        return (await task).stop_reason

    assert asyncio.run(invoke()) == "killed"
    assert metric(faults[0], **faults[1]) == before + 1
    assert caplog.text.count("cannot subscribe to kills") == 1
    assert "hunter2" not in caplog.text


@pytest.mark.usefixtures("faulty")
def test_kill_listener_survives_an_internal_error(
    hold: Hold, server: Server, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next kill is received."""
    received: list[str] = []

    def kill(*, agent: str, before: float) -> int:
        received.append(agent)
        if len(received) == 1:
            raise RuntimeError("fault")
        return 0

    monkeypatch.setattr(LIVE, "kill", kill)
    hold({}, server.url)
    eventually(listening(server))
    run("kill", "--agent", "first")
    eventually(lambda: received == ["first"])
    run("kill", "--agent", "second")
    eventually(lambda: received == ["first", "second"])


def forward_first_kill(end: int) -> NoReturn:
    """Signal readiness, then write the first kill received to a pipe, and exit."""
    received = threading.Event()

    def kill(*, agent: str, before: float) -> int:
        os.write(end, agent.encode())
        received.set()
        return 0

    setattr(LIVE, "kill", kill)  # noqa: B010  mypy rejects assigning to a method
    os.write(end, b"r")
    received.wait(PATIENCE)
    os._exit(0)


def test_a_kill_reaches_every_process(server: Server, hold: Hold, run: Run) -> None:
    """Including forked ones."""
    hold({}, server.url)
    eventually(listening(server))
    children = []
    for _ in range(3):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            forward_first_kill(writing)
        os.close(writing)
        assert os.read(reading, 1) == b"r"
        children.append((child, reading))
    eventually(listening(server, 4))
    assert "to 4 processes" in run("kill", "--agent", "x")[1]
    for child, reading in children:
        assert os.read(reading, 1) == b"x"
        os.close(reading)
        os.waitpid(child, 0)


def test_a_kill_from_another_program_ends_the_running_agents_of_every_process(
    server: Server, tmp_path: Path
) -> None:
    """Three programs with three agents each: matching agents end in mid-answer, and no others.

    The server pushes a kill to its subscribers; a process that just lost its connection reads it
    when reconnecting.
    """
    policy = tmp_path / "limits.yaml"
    policy.write_text("quotas: {}")
    variables = {"OTEL_LIMITS_POLICY": str(policy), "OTEL_LIMITS_QUOTA_STORE": server.url}
    arguments = {"names": ["research-1", "research-2"], "last": "writer"}
    command = [sys.executable, str(WORKER), "stream", json.dumps(arguments)]
    with ExitStack() as stack:
        workers = [stack.enter_context(process(command, variables)) for _ in range(3)]
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        for worker in workers:
            assert worker.stdout is not None
            assert [worker.stdout.readline() for _ in range(2)] == ["ready\n", "began\n"]
        eventually(listening(server, 3))
        code = "import sys; from otel_limits.cli import main; sys.exit(main())"
        told = subprocess.run(
            [sys.executable, "-c", code, "kill", "--agent", "research-*"],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE,
        )
        assert told.stdout == "Sent kill for 'research-*' to 3 processes.\n"
        said = [json.loads(worker.communicate(timeout=PATIENCE)[0]) for worker in workers]
    assert said == [{"research-1: killed": 1, "research-2: killed": 1, "writer: end_turn": 1}] * 3


def test_kill_listener_reconnects_within_a_second() -> None:
    """A kill sent during the gap must not be late."""
    assert kill_listener.RETRY_SECONDS <= 0.5


def test_a_kill_needs_a_name(run: Run) -> None:
    """Killing every agent requires an explicit `*`."""
    with pytest.raises(SystemExit) as caught:
        run("kill")
    assert caught.value.code == 2


# --- conversations --------------------------------------------------------------------------------

CHATS = {
    "1" * 32: ConversationSums(turns=8, tokens=100),
    "2" * 32: ConversationSums(turns=7, tokens=999, cost_at_most=Decimal("0.4")),
    "3" * 32: ConversationSums(turns=11, tokens=1),
    "4" * 32: ConversationSums(turns=7, tokens=1, cost_at_most=Decimal("0.45")),
    "5" * 32: ConversationSums(turns=8, tokens=1, granted={"max_turns": 90}),
}


@pytest.fixture
def chats(server: Server, store: SharedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations of an agent, whose caps are set in the environment."""
    store.run(
        [
            CountConversation(f"chat-{number}", key, "chatty", parts_of(sums), 3600)
            for number, (key, sums) in enumerate(CHATS.items())
        ]
    )
    monkeypatch.setenv("OTEL_LIMITS_QUOTA_STORE", server.url)
    monkeypatch.setenv("OTEL_LIMITS_CONVERSATION_MAX_TURNS", "10")
    monkeypatch.setenv("OTEL_LIMITS_CONVERSATION_MAX_COST_USD", "0.5")


@pytest.mark.usefixtures("chats")
def test_conversations_near_a_cap_are_listed_with_it(run: Run) -> None:
    """The closest first, from 80% on, also without quotas; what was granted raises the cap."""
    status, out, _ = run("quotas", "--format", "json")
    answer = json.loads(out)
    rows = answer["conversations"]
    assert (status, answer["quotas"]) == (0, [])
    assert [(row["conversation"][0], row["limit"], row["used"], row["cap"]) for row in rows] == [
        ("3", "conversation_max_turns", 11, 10),
        ("4", "conversation_max_cost_usd", "0.45", "0.5"),
        ("1", "conversation_max_turns", 8, 10),
        ("2", "conversation_max_cost_usd", "0.4", "0.5"),
    ]
    assert {(row["agent"], row["idle_since"][-1]) for row in rows} == {("chatty", "Z")}


@pytest.mark.usefixtures("chats")
def test_conversations_have_a_table(run: Run) -> None:
    """With their whole hash, which `reset` takes."""
    lines = [line.split() for line in run("quotas")[1].splitlines()]
    (row,) = (line for line in lines if line[:1] == ["4" * 32])
    assert row[1:5] == ["chatty", "conversation_max_cost_usd", "0.45", "0.5"]
    assert row[-3:] == ["nearly", "used", "up"]


@pytest.mark.usefixtures("chats")
def test_conversations_are_chosen_by_glob_and_number(run: Run) -> None:
    """As keys of quotas are."""
    rows = json.loads(run("quotas", "--format", "json", "--top", "1")[1])["conversations"]
    assert [row["conversation"] for row in rows] == ["3" * 32]
    rows = json.loads(run("quotas", "--format", "json", "--key", "44*")[1])["conversations"]
    assert [row["conversation"] for row in rows] == ["4" * 32]


@pytest.mark.usefixtures("chats")
def test_conversation_is_reset_by_the_beginning_of_its_hash(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The ledger records who did it."""
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", str(tmp_path / "ledger.db"))
    status, out, _ = run("quotas", "reset", "--conversation", "33333333")
    assert (status, out.splitlines()) == (
        0,
        [f"Reset conversation {'3' * 32}.", f"Recorded in the ledger {tmp_path}/ledger.db."],
    )
    rows = json.loads(run("quotas", "--format", "json")[1])["conversations"]
    assert [row["conversation"][0] for row in rows] == ["4", "1", "2"]
    (grant,) = json.loads(run("audit", "grants", "--format", "json")[1])["grants"]
    assert (grant["quota"], grant["change"]) == ("(conversation)", "reset")


@pytest.mark.usefixtures("chats")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "Give the name of a quota, or a conversation with --conversation HASH."),
        (("daily", "--conversation", "3" * 32), "Give the name of a quota, or a conversation"),
        (("--conversation", "333"), "--conversation must have at least 8 characters of a hash"),
        (("--conversation", "9" * 32), "No conversation '99999999999999999999999999999999' in the"),
    ],
)
def test_reset_of_an_unknown_conversation_is_refused(
    run: Run, arguments: tuple[str, ...], sentence: str
) -> None:
    """With the reason, and nothing is changed."""
    status, _, err = run("quotas", "reset", *arguments)
    assert status == 2
    assert sentence in err
