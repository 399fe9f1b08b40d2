"""The grace in an outage: each worker may use an equal share of the remaining amount."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.core.events import Invocation
from otel_limits.quotas.fallback import Fallback
from otel_limits.quotas.needs import QuotaNeed, QuotaReservation
from otel_limits.quotas.store import (
    CountState,
    Demand,
    Reply,
)
from otel_limits.quotas.windows import Windows
from otel_limits.runs.clock import CLOCK
from otel_limits.runs.quota_gate import AdmissionRequest
from otel_limits.settings.policy.file import PolicyFile
from tests.quotas.fleets import quota

if TYPE_CHECKING:
    from pathlib import Path

    from otel_limits.quotas.quota import Quota
    from otel_limits.testing import FakeTime

pytestmark = pytest.mark.usefixtures("faulty")


def need_of(held: Quota) -> QuotaNeed:
    """The need of one call for a quota."""
    key = held.key.key(held.name, lambda _: None)
    parts: dict[str, Any] = {"limit": held.amount, "amount": 1, "at_most": False, "certain": True}
    return QuotaNeed(held, key, **parts, model="m", action="halt")


def demand_of(held: Quota, now: float) -> Demand:
    """The resulting demand at a given time."""
    return Demand(count=held.count(need_of(held).key, now), amount=1, limit=held.amount)


def test_worker_without_a_refresh_has_no_share_of_the_new_window() -> None:
    """Others may have used it through the store, so even idle workers keep refreshing."""
    now = [10.0]
    paced = replace(quota(), windows=Windows("PT1M"))
    key = paced.key.key("q", lambda _: None)
    fallback = Fallback(CLOCK.now, lambda: now[0], 300.0)
    fallback.remember(need_of(paced), demand_of(paced, now[0]), CountState(40, 0, 100))
    fallback.looked(fallback.shared(), Reply("looked", 10.0, (CountState(40, 0, 100),), workers=2))
    fallback.on_reply(10.0)
    request = AdmissionRequest(
        invocation=Invocation(agent="a", id="i", root_id="i"), model="m", input=1
    )

    def share() -> int | None:
        """The share of one of two workers, while the store is away."""
        fallback.enter_outage()
        demands = (demand_of(paced, now[0]),)
        reservation = QuotaReservation(uuid.uuid4().hex, request, [need_of(paced)], demands)
        outcome = fallback.decide(reservation)
        return outcome.reply.states[0].limit if outcome.reply is not None else None

    assert share() == 30
    now[0] = 70.0
    assert fallback.shared() == ((paced.count(key, 70.0), 100),)
    assert share() == 50  # the last reply came before the window began
    fallback.on_reply(65.0)
    assert share() is None
    fallback.looked(fallback.shared(), Reply("looked", 71.0, (CountState(90, 0, 100),), workers=2))
    assert share() == 5
    # A call of the previous window ends: it reveals nothing about this one.
    fallback.remember(need_of(paced), demand_of(paced, 10.0), CountState(41, 0, 0))
    assert share() == 5


def test_only_keys_with_a_call_in_the_last_minute_are_read(fake_time: FakeTime) -> None:
    """An idle process reads nothing, so it does not reduce the shares of others."""
    fallback = Fallback(CLOCK.now, lambda: 1000.0, 300.0)
    demand = demand_of(quota(), 1000.0)
    fallback.remember(need_of(quota()), demand, CountState(1, 0, 100))
    fake_time.advance(59)
    assert fallback.shared() == ((demand.count, 100),)
    fake_time.advance(1)
    assert fallback.shared() == ()


# --- the policy file ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30.0), ("2m", 120.0), ("0", 0.0), ("0s", 0.0)]
)
def test_grace_is_read(tmp_path: Path, text: str, seconds: float) -> None:
    """A duration, or 0 for none; 30 seconds by default."""
    path = tmp_path / "limits.yaml"
    path.write_text(f"quotas:\n  a: {{tokens: 5, window: day, grace: {text}}}\n")
    (entry,) = PolicyFile(str(path)).document.quotas.values()
    assert entry.value.grace == seconds
    assert quota().grace == 30.0


@pytest.mark.parametrize("text", ["-1", "5", "soon", "false", "1.5s"])
def test_a_wrong_grace_is_a_mistake(tmp_path: Path, text: str) -> None:
    """The message is one sentence."""
    path = tmp_path / "limits.yaml"
    path.write_text(f"quotas:\n  a: {{tokens: 5, window: day, grace: {text}}}\n")
    (mistake,) = PolicyFile(str(path)).mistakes
    assert "grace" in mistake
    assert "must be a duration such as 30s or 5m, or 0 for none" in mistake
