"""On guard: every name of Strands that is used is probed, and no loss of one is silent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from otel_limits import Limits, LimitsPlugin, disable, enable
from otel_limits.bindings.known import FRAMEWORKS
from otel_limits.runtime.enable import enable_leniently
from otel_limits.runtime.guard import Enforcement, probed
from otel_limits.runtime.runtime import RUNTIME
from otel_limits.runtime.wiring import Wiring
from otel_limits.testing import ScriptedModel, endless, says, uses

if TYPE_CHECKING:
    from tests.conftest import MakeAgent, Metric


def test_installed_framework_has_every_api() -> None:
    """When this fails after an update of Strands, it names what is gone."""
    assert probed(FRAMEWORKS) == Enforcement()


def enforcing(metric: Metric) -> dict[str, float]:
    """Sources that are exported, with their values."""
    sources = ("run", "autoload", "instrumentor", "provider", "code", "parent", "plugin")
    found: dict[str, Any] = {
        each: metric("otel_limits_enforcing", source=each, framework="strands") for each in sources
    }
    return {source: value for source, value in found.items() if value}


def test_the_first_source_is_the_one(metric: Metric) -> None:
    """Enabling twice changes nothing; disabling is final."""
    assert RUNTIME.enforcement().source is None
    enable_leniently("instrumentor")
    enable(Limits(max_turns=3))
    assert RUNTIME.enforcement() == Enforcement(source="instrumentor")
    assert RUNTIME.enforcement().is_enforcing
    assert enforcing(metric) == {"instrumentor": 1}
    disable()
    assert RUNTIME.enforcement().source is None
    assert enforcing(metric) == {}


@pytest.mark.usefixtures("faulty")
def test_fault_while_enabling_is_one_message(
    metric: Metric, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the reason without a traceback, and the metric is 0."""

    def fail(*_: object) -> None:
        raise RuntimeError("no room for redis://u:hush@host")

    monkeypatch.setattr(Wiring, "connect", fail)
    enable_leniently("run")
    assert not RUNTIME.is_on  # no agent begins an invocation that nothing follows
    assert "limits are not enforced: enabling failed (RuntimeError" in caplog.text
    assert "Traceback" not in caplog.text
    assert "hush" not in caplog.text
    assert metric("otel_limits_enforcing", source="run", framework="") == 0


@pytest.mark.usefixtures("faulty")
def test_failed_enabling_is_forgotten_once_it_succeeds(
    make_agent: MakeAgent, metric: Metric
) -> None:
    """Autoload may fail where the program's own `enable()` works; agents are limited then."""
    with patch.object(Wiring, "connect", side_effect=RuntimeError("no room")):
        enable_leniently("autoload")
    assert not RUNTIME.enforcement().is_enforcing
    enable(max_turns=2)
    model = ScriptedModel(endless(uses("search")))
    assert make_agent(model)("go").stop_reason == "max_turns"
    assert RUNTIME.enforcement() == Enforcement(source="autoload")
    assert enforcing(metric) == {"autoload": 1}
    assert metric("otel_limits_enforcing", source="autoload", framework="") == 1


@pytest.mark.usefixtures("faulty")
def test_a_fault_in_quotas_leaves_every_other_limit(
    make_agent: MakeAgent, metric: Metric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in force, and nothing says otherwise."""

    def fail(*_: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(Wiring, "hold_quotas", fail)
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "2")
    enable_leniently("run")
    model = ScriptedModel(endless(uses("search")))
    assert make_agent(model)("go").stop_reason == "max_turns"
    assert model.calls == 2
    assert metric("otel_limits_enforcing", source="run", framework="strands") == 1


def test_a_plugin_is_a_source(make_agent: MakeAgent, metric: Metric) -> None:
    """Its agent is limited although nothing else was switched on."""
    agent = make_agent(ScriptedModel([says("done")]), plugins=[LimitsPlugin(Limits(max_turns=3))])
    assert agent("go").stop_reason == "end_turn"
    assert RUNTIME.enforcement() == Enforcement(source="plugin")
    assert enforcing(metric) == {"plugin": 1}


def test_disabled_process_has_no_metric(monkeypatch: pytest.MonkeyPatch, metric: Metric) -> None:
    """OTEL_LIMITS_DISABLED is not a failure to enforce."""
    monkeypatch.setenv("OTEL_LIMITS_DISABLED", "true")
    enable(Limits(max_turns=3))
    assert RUNTIME.enforcement() == Enforcement()
    assert enforcing(metric) == {}


@pytest.mark.usefixtures("faulty")
def test_untracked_invocation_is_reported(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for its agent; the process is not reported as enforcing until it is enabled again."""
    from otel_limits.runs.registry import LIVE

    enable(Limits(max_turns=3))
    agent = make_agent(ScriptedModel([says("one"), says("two")]))
    with monkeypatch.context() as faulty:
        faulty.setattr(LIVE, "start", lambda *_, **__: 1 / 0)
        agent("go")
        agent("go")
    said = [text for text in caplog.messages if "limits are not enforced" in text]
    assert len(said) == 1
    assert "calls of agent" in said[0]
    assert not RUNTIME.enforcement().is_enforcing
    disable()
    enable(Limits(max_turns=3))
    assert RUNTIME.enforcement().is_enforcing
