"""Reservations on a server for calls whose worst case exceeds the quota."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from otel_limits.testing import ScriptedModel, endless, says
from tests.unit.quotas.test_estimates import Meeting

if TYPE_CHECKING:
    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold, Server


STORES = ["memory", "redis"]


def url_of(store: str, request: pytest.FixtureRequest) -> str:
    """The URL of a kind of store."""
    if store == "memory":
        return "memory://"
    server: Server = request.getfixturevalue("server")
    return server.url


@pytest.mark.parametrize("store", STORES)
def test_a_quota_below_every_estimate_admits_calls_one_after_the_other(
    hold: Hold, make_agent: MakeAgent, store: str, request: pytest.FixtureRequest
) -> None:
    """1,000 tokens an hour: no estimate of a model without a cap is below 4,096."""
    hold({"small": {"tokens": 1_000, "window": "month"}}, url_of(store, request))
    usage = {"inputTokens": 100, "outputTokens": 300, "totalTokens": 400}
    agent = make_agent(ScriptedModel(endless(says("done", usage=usage))), tools=[])
    reasons = []
    for _ in range(5):
        agent.messages.clear()
        reasons.append(agent("go").stop_reason)
    assert reasons == ["end_turn"] * 3 + ["quota_exceeded"] * 2


@pytest.mark.parametrize("store", STORES)
def test_quota_below_every_estimate_admits_one_call_at_a_time(
    hold: Hold, make_agent: MakeAgent, store: str, request: pytest.FixtureRequest
) -> None:
    """Otherwise concurrent calls could exceed it many times over."""
    hold({"small": {"tokens": 1_000, "window": "month"}}, url_of(store, request))
    model = Meeting()
    first = threading.Thread(target=make_agent(model), args=("go",))
    first.start()
    assert model.is_asked.wait(20)
    other = make_agent(ScriptedModel(endless(says("done"))))
    concurrent = other("go").stop_reason
    model.may_answer.set()
    first.join()
    other.messages.clear()
    assert (concurrent, other("go").stop_reason) == ("quota_exceeded", "end_turn")
