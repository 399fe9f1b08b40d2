"""Amounts by plan and by key, and amounts that an operator sets while agents run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import otel_limits
from otel_limits import cli
from otel_limits.quotas.engine import Engine
from otel_limits.runs.registry import LIVE
from otel_limits.testing import ScriptedModel, endless, says
from tests.quotas.fixtures import eventually
from tests.unit.agents.test_quotas import carrying

if TYPE_CHECKING:
    from pathlib import Path

    from strands import Agent

    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold, Server

PLANS: dict[str, Any] = {
    "model_calls": {"free": 1, "pro": 3, "default": 2},
    "window": "year",
    "key": "baggage.tenant.id",
    "plan": "attribute.plan",
    "keys": {"acme": 5, 42: 4},
}
MANY = 8
"""More calls than any of these amounts."""

Run = Any


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command: its exit status and output."""

    def type_in(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(arguments)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return type_in


def agent_of(make_agent: MakeAgent, plan: str | None) -> tuple[Agent, ScriptedModel]:
    """An agent of a plan, and its model."""
    model = ScriptedModel(endless(says("done")))
    attributes = {} if plan is None else {"plan": plan}
    return make_agent(model, trace_attributes=attributes), model


def calls(make_agent: MakeAgent, plan: str | None, tenant: str, most: int = MANY) -> int:
    """How many of several calls of a tenant reach the model."""
    agent, model = agent_of(make_agent, plan)
    with carrying(tenant__id=tenant):
        for _ in range(most):
            agent("go")
    return model.calls


@pytest.mark.parametrize(
    ("plan", "tenant", "permitted"),
    [
        ("free", "joe", 1),
        ("pro", "joe", 3),
        ("enterprise", "joe", 2),
        (None, "joe", 2),
        ("free", "acme", 5),
        ("pro", "42", 4),
    ],
)
def test_plan_of_the_call_chooses_the_amount_of_its_key(
    hold: Hold, make_agent: MakeAgent, url: str, plan: str | None, tenant: str, permitted: int
) -> None:
    """An unknown plan has the default amount; that of a single key precedes plans."""
    hold({"q": PLANS}, url)
    assert calls(make_agent, plan, tenant) == permitted
    with carrying(tenant__id=tenant):
        left = otel_limits.remaining("q", attributes={"plan": plan})
    assert (left.limit, left.left) == (permitted, 0)


def test_quotas_command_shows_the_limit_of_a_plan(
    hold: Hold, make_agent: MakeAgent, server: Server, run: Run
) -> None:
    """The policy file alone does not show which plan a key has."""
    hold({"q": PLANS}, server.url)
    calls(make_agent, "pro", "joe", 2)
    (row,) = json.loads(run("quotas", "--format", "json")[1])["quotas"]
    assert (row["used"], row["limit"], row["remaining"]) == (2, 3, 1)


def test_set_amount_precedes_plan_and_key_until_it_is_unset(
    hold: Hold, make_agent: MakeAgent, server: Server, run: Run
) -> None:
    """At the next call of a running agent; a grant adds to it."""
    hold({"q": PLANS}, server.url)
    assert calls(make_agent, "free", "joe") == 1
    status, out, _ = run("quotas", "set", "q", "joe", "4")
    assert status == 0
    assert out.splitlines()[0].endswith("quota 'q' to 4 model calls.")
    assert calls(make_agent, "free", "joe") == 3
    run("quotas", "grant", "q", "joe", "2", "--until", "2999-01-01")
    assert calls(make_agent, "free", "joe") == 2
    (row,) = json.loads(run("quotas", "--format", "json")[1])["quotas"]
    assert (row["used"], row["limit"]) == (6, 6)
    assert run("quotas", "unset", "q", "joe")[0] == 0
    (row,) = json.loads(run("quotas", "--format", "json")[1])["quotas"]
    assert (row["used"], row["limit"]) == (6, 3)
    assert run("quotas", "unset", "q", "joe")[0] == 2
    assert run("quotas", "set", "q", "acme", "1")[0] == 0
    assert calls(make_agent, "pro", "acme") == 1


def test_set_amount_replaces_an_earlier_one(
    hold: Hold, make_agent: MakeAgent, server: Server, run: Run
) -> None:
    """Below what is used, it refuses from then on."""
    hold({"q": PLANS}, server.url)
    run("quotas", "set", "q", "joe", "9")
    assert calls(make_agent, "free", "joe", 3) == 3
    run("quotas", "set", "q", "joe", "2")
    assert calls(make_agent, "pro", "joe") == 0
    run("quotas", "set", "q", "joe", "4")
    assert calls(make_agent, "pro", "joe") == 1


def test_halt_by_a_set_amount_does_not_blame_the_policy_file(
    hold: Hold,
    make_agent: MakeAgent,
    server: Server,
    run: Run,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The amount on that line is another one."""
    hold({"q": PLANS}, server.url)
    assert calls(make_agent, "free", "ann") == 1
    assert "changed by an operator" not in caplog.text
    run("quotas", "set", "q", "joe", "1")
    assert calls(make_agent, "pro", "joe") == 1
    assert ", and was changed by an operator." in caplog.text


def test_set_amount_ends_at_its_time(
    hold: Hold, make_agent: MakeAgent, server: Server, run: Run
) -> None:
    """By the server's clock."""
    hold({"q": PLANS}, server.url)
    assert run("quotas", "set", "q", "joe", "4", "--until", "2999-01-01")[0] == 0
    assert calls(make_agent, "free", "joe", 2) == 2
    (grants,) = server.client.keys("*:q:*:grants")
    (member,) = server.client.zrange(grants, 0, -1)
    server.client.zadd(grants, {member: 1})
    assert calls(make_agent, "free", "joe") == 0


def test_set_amount_is_seen_by_the_reads_of_every_worker(
    hold: Hold, make_agent: MakeAgent, server: Server, run: Run
) -> None:
    """They read once a second what they may share during an outage."""
    hold({"q": PLANS}, server.url)
    calls(make_agent, "free", "joe", 1)
    gate = LIVE.observers.gate
    assert isinstance(gate, Engine)
    client = gate.client
    (count, amount) = client.fallback.shared()[0]
    assert amount == 1
    run("quotas", "set", "q", "joe", "9")

    def is_known() -> bool:
        standing = client.fallback.known(count)
        return standing is not None and standing.limit == 9

    eventually(is_known)


def test_set_and_unset_are_in_the_ledger(
    hold: Hold,
    make_agent: MakeAgent,
    server: Server,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With amount, end and author."""
    hold({"q": PLANS}, server.url)
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", str(tmp_path / "ledger.db"))
    run("quotas", "set", "q", "joe", "9", "--until", "2999-01-01")
    run("quotas", "set", "q", "joe", "8")
    run("quotas", "unset", "q", "joe")
    rows = json.loads(run("audit", "grants", "--format", "json")[1])["grants"]
    assert [(each["change"], each["amount"], bool(each["until"])) for each in rows] == [
        ("set", "9", True),
        ("set", "8", False),
        ("unset", None, False),
    ]
    assert all("@" in each["by"] for each in rows)
