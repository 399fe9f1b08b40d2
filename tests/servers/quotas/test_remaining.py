"""Refusals in an outage, and the remaining quota of a server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

import otel_limits
from otel_limits.testing import ScriptedModel, endless, says
from tests.unit.quotas.test_refusals import the_day_ends

if TYPE_CHECKING:
    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold, Server


@pytest.mark.usefixtures("faulty")
def test_outage_refusal_is_distinct_from_an_exceeded_quota(
    hold: Hold, make_agent: MakeAgent, own_server: Server
) -> None:
    """Its reason, exception and numbers state that the store was unavailable."""
    calls = {"model_calls": 5, "window": "day", "action": "raise", "grace": 0}
    hold({"calls": calls}, own_server.url)
    agent = make_agent(ScriptedModel(endless(says("done"))))
    agent("go")
    own_server.stop()
    with pytest.raises(otel_limits.QuotaUnavailableError, match="is unavailable") as caught:
        agent("go")
    stop = caught.value.stop
    assert stop is not None
    assert stop.reason == otel_limits.QUOTA_UNAVAILABLE_STOP_REASON
    assert stop.quota is not None
    assert (stop.quota.used, stop.quota.limit, stop.quota.retry_after_seconds) == (1, 5, 1.0)


# --- remaining() ----------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["memory", "redis"])
def test_remaining_quota_is_returned_without_a_reservation(
    hold: Hold, make_agent: MakeAgent, store: str, request: pytest.FixtureRequest
) -> None:
    """It returns the store's numbers, and a second query changes none of them."""
    url = "memory://" if store == "memory" else request.getfixturevalue("server").url
    hold({"calls": {"model_calls": 3, "window": "day", "key": "agent"}}, url)
    make_agent(ScriptedModel(endless(says("done"))), name="joe")("go")
    for _ in range(2):
        assert otel_limits.remaining("calls", agent="joe") == otel_limits.Remaining(
            quota="calls",
            key="joe",
            unit="model calls",
            limit=3,
            used=1,
            reserved=0,
            left=2,
            resets_at=the_day_ends(),
        )
    assert asyncio.run(otel_limits.remaining_async("calls", agent="jane")).left == 3


@pytest.mark.usefixtures("faulty")
def test_remaining_quota_raises_in_an_outage(hold: Hold, own_server: Server) -> None:
    """It must not return a made-up number."""
    hold({"calls": {"model_calls": 3, "window": "day"}}, own_server.url)
    assert otel_limits.remaining("calls").left == 3
    own_server.stop()
    with pytest.raises(otel_limits.QuotaUnavailableError, match="its store is unavailable"):
        otel_limits.remaining("calls")
