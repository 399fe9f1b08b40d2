"""Settings besides limits: prices, the tool log, the kill signal."""

from __future__ import annotations

from decimal import Decimal
from importlib.metadata import PackageNotFoundError
from typing import TYPE_CHECKING

import pytest

import otel_limits
from otel_limits import Limits, ModelCall, Stop, enable
from otel_limits.cli import main
from otel_limits.core import price_lookup
from otel_limits.core.installing import install_command
from otel_limits.core.version import own_version
from otel_limits.observers import toollog
from otel_limits.runtime.enable import enable_leniently
from otel_limits.testing import ScriptedModel, endless, says, uses

if TYPE_CHECKING:
    from pathlib import Path

    from otel_limits.core.events import Event
    from tests.conftest import MakeAgent, Metric

POLICY = """
models:
  "scripted*": {price: {input: 100, output: 200}}
"""


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A policy file with the price of the scripted model: 0.002 USD a call."""
    path = tmp_path / "limits.yaml"
    path.write_text(POLICY)
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))
    return path


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package with the price list is not installed."""
    monkeypatch.setattr(price_lookup, "installed_version", lambda: None)


def test_calls_are_priced_by_the_policy_file(
    make_agent: MakeAgent, policy: Path, source: str, events: list[Event]
) -> None:
    """Each call has its exact price, and the stop their sum."""
    enable(observers=[events.append])
    make_agent(ScriptedModel([uses("search"), says("done")]))("go")
    assert [f.price for f in events if isinstance(f, ModelCall)] == [Decimal("0.002")] * 2
    assert [f.cost for f in events if isinstance(f, Stop)] == [Decimal("0.004")]


def test_a_cost_limit_halts(make_agent: MakeAgent, policy: Path, source: str) -> None:
    """The limit is compared with exact amounts."""
    enable(Limits(max_cost_usd=Decimal("0.006")))
    model = ScriptedModel(endless(uses("search")))
    assert (make_agent(model)("go").stop_reason, model.calls) == ("max_cost_usd", 3)


def test_a_cost_limit_without_prices_is_a_mistake(no_package: None) -> None:
    """Asking for a cost limit where no price can be known is refused, with what to do."""
    with pytest.raises(otel_limits.ConfigurationError, match=r"Run: pip install .*\[prices\]'"):
        enable(Limits(max_cost_usd=Decimal(1)))


def test_run_with_a_cost_limit_without_prices_is_refused(
    no_package: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program does not start, and the message names the extra to install."""
    assert main(["run", "--max-cost-usd", "1", "--", "absent"]) == 2
    assert install_command("prices") in capsys.readouterr().err


@pytest.mark.usefixtures("faulty")
def test_cost_limit_without_prices_halts_where_nothing_could_be_refused(
    make_agent: MakeAgent, no_package: None, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instrumentor must not raise, but its only limit must hold."""
    monkeypatch.setenv("OTEL_LIMITS_MAX_COST_USD", "1")
    enable_leniently("instrumentor")
    model = ScriptedModel(endless(uses("search")))
    assert (make_agent(model)("go").stop_reason, model.calls) == ("max_cost_usd", 1)


def test_a_plugin_with_a_cost_limit_without_prices_is_a_mistake(
    make_agent: MakeAgent, no_package: None
) -> None:
    """The agent that asks for it cannot be made."""
    plugin = otel_limits.LimitsPlugin(Limits(max_cost_usd=Decimal(1)))
    with pytest.raises(otel_limits.ConfigurationError, match="needs prices"):
        make_agent(ScriptedModel([]), plugins=[plugin])


def test_an_unknown_price_is_unknown(
    make_agent: MakeAgent, no_package: None, source: str, events: list[Event], metric: Metric
) -> None:
    """Without a price a call has none, and is counted as unpriced."""
    enable(observers=[events.append])
    make_agent(ScriptedModel([says("done")]))("go")
    assert [f.price for f in events if isinstance(f, ModelCall)] == [None]
    assert [(f.cost, f.unpriced_calls) for f in events if isinstance(f, Stop)] == [(0, 1)]
    assert metric("otel_limits_unpriced_tokens_total", agent="tester", model="scripted") == 15


def test_an_unknown_price_can_halt(
    make_agent: MakeAgent, policy: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With OTEL_LIMITS_UNPRICED=halt a model without a price is a breach of the cost limit."""
    monkeypatch.setenv("OTEL_LIMITS_UNPRICED", "halt")
    enable(Limits(max_cost_usd=Decimal(1)))
    model = ScriptedModel(endless(uses("search")), model_id="unknown-model")
    assert (make_agent(model)("go").stop_reason, model.calls) == ("max_cost_usd", 1)


def test_the_tool_log_keeps_every_nth_call_and_the_trigger(
    make_agent: MakeAgent, source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With an interval of 2, of three calls the second is kept, and the third that halted."""
    monkeypatch.setenv("OTEL_LIMITS_TOOL_LOG_DIR", str(tmp_path / "log"))
    monkeypatch.setenv("OTEL_LIMITS_TOOL_LOG_INTERVAL", "2")
    enable(Limits(max_turns=3))
    model = ScriptedModel(endless(uses("search", arguments={"query": "x"})))
    make_agent(model)("go")
    entries = list(toollog.read(tmp_path / "log"))
    assert [(e.number, e.trigger, e.result) for e in entries] == [
        (2, False, "nothing found"),
        (3, True, "nothing found"),
    ]
    assert entries[0].arguments == '{"query": "x"}'


def test_no_tool_log_unless_asked_for(make_agent: MakeAgent, tmp_path: Path) -> None:
    """By default no content is stored anywhere."""
    enable(Limits(max_turns=1))
    make_agent(ScriptedModel(endless(uses("search"))))("go")
    assert list(tmp_path.iterdir()) == []


def test_a_frozen_application_without_metadata_is_limited(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, metric: Metric
) -> None:
    """Where the package's metadata is missing, the version is unknown and all else works."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("otel_limits.core.version.version", missing)
    own_version.cache_clear()
    enable(Limits(max_turns=1))
    assert make_agent(ScriptedModel(endless(uses("search"))))("go").stop_reason == "max_turns"
    unsaid = dict.fromkeys(("service_version", "service_namespace", "deployment_environment"), "")
    assert metric("otel_limits_build_info", version="unknown", **unsaid) == 1
    own_version.cache_clear()
