"""Bad values: refused with a sentence, and never taken for "no limit"."""

from __future__ import annotations

import logging
import math
import pickle
import re
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import otel_limits
from otel_limits import ConfigurationError, Limits, LimitsPlugin, enable
from otel_limits.core.limits import LIMIT_NAMES, LOOP_LIMITS
from otel_limits.core.values import (
    CALLS_PER_TOOL,
    CAP,
    FRACTIONS,
    MONEY,
    PORT,
    PRICE,
    SECONDS,
    SWITCHABLE_CAP,
    Kind,
    choice,
)
from otel_limits.instrumentor import OtelLimitsInstrumentor
from otel_limits.runtime.enable import enable_leniently
from otel_limits.runtime.runtime import RUNTIME
from otel_limits.settings.settings_reader import read_settings
from otel_limits.testing import ScriptedModel, endless, only, says, uses
from tests.rules import over

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import MakeAgent, Metric

WHOLE = [
    name
    for name in LIMIT_NAMES
    if name not in ("max_cost_usd", "max_duration_seconds") and "per_tool" not in name
]
BAD = [0, -1, 2.5, 2.0, True, False, "5", math.nan, math.inf, Fraction(2), Decimal(2), [5]]


@over({f"{name}={value!r}": (name, value) for name in WHOLE for value in BAD}, "name", "value")
def test_a_cap_is_a_positive_whole_number(name: str, value: Any) -> None:
    """Anything else is a `ValueError` that names the field, the bound and the value."""
    if value == 0 and value is not False and name in LOOP_LIMITS:
        assert only(name, value).active == ()
        return
    with pytest.raises(ValueError, match=name) as raised:
        only(name, value)
    assert "whole number of 1 or more" in str(raised.value)
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize(
    "value",
    [0, -1, 0.0, -0.5, math.nan, math.inf, True, "1", Decimal("NaN"), Decimal("Infinity")],
)
def test_cost_not_positive_or_not_finite_is_rejected(value: Any) -> None:
    """Such a cap could quietly mean "no limit"."""
    with pytest.raises(ValueError, match="max_cost_usd must be an amount of USD above 0"):
        only("max_cost_usd", value)


@pytest.mark.parametrize("value", [0.5, 0.1, 1e-7, 1.1 + 2.2])
def test_cost_as_float_counts_by_its_shortest_decimal_form(value: float) -> None:
    """A person who writes 0.1 means a tenth, and not the binary fraction next to it."""
    assert only("max_cost_usd", value).max_cost_usd == Decimal(repr(value))


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, True, "5"])
def test_a_duration_is_finite(value: Any) -> None:
    """Seconds are a finite number above 0."""
    with pytest.raises(ValueError, match="max_duration_seconds must be a number of seconds above"):
        only("max_duration_seconds", value)


@pytest.mark.parametrize("value", [5, {"search": 0}, {"search": True}, {1: 2}, [("search", 2)]])
def test_caps_per_tool_are_a_mapping(value: Any) -> None:
    """Tool names are mapped to whole numbers."""
    with pytest.raises(ValueError, match="max_calls_per_tool"):
        only("max_calls_per_tool", value)


@pytest.mark.parametrize("action", ["stop", "", "HALT", 5])
def test_an_action_is_one_of_them(action: Any) -> None:
    """The sentence lists what there is."""
    with pytest.raises(ValueError, match="must be one of observe, halt, wrap_up, raise, ask, got"):
        enable(action=action)
    with pytest.raises(ValueError, match="must be one of observe, halt, wrap_up, raise, ask, got"):
        LimitsPlugin(action=action)


@pytest.mark.parametrize(
    "text", ["abc", "0", "-1", "2.5", "1e3", "\u0661", "5 turns", "0x10", "+5"]
)
def test_enable_refuses_a_bad_variable(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """It names variable, bound and value, and leaves everything off."""
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", text)
    with pytest.raises(ConfigurationError) as raised:
        enable()
    assert str(raised.value) == (
        f"OTEL_LIMITS_MAX_TURNS must be a whole number of 1 or more, got {text!r}. "
        "Unset means no limit."
    )
    assert not RUNTIME.is_on


ROADS: list[tuple[Kind[Any], str, Any]] = [
    (CAP, "0", 0),
    (SWITCHABLE_CAP, "-1", -1),
    (PORT, "70000", 70_000),
    (SECONDS, "0.0", 0.0),
    (MONEY, "-0.50", Decimal("-0.50")),
    (PRICE, "-1", -1),
    (FRACTIONS, "0.5,1.5", [0.5, 1.5]),
    (CALLS_PER_TOOL, "search=0", {"search": 0}),
    (choice("a", "b"), "c", "c"),
]


@pytest.mark.parametrize(("kind", "text", "value"), ROADS, ids=[text for _, text, _ in ROADS])
def test_all_roads_have_one_sentence(kind: Kind[Any], text: str, value: Any) -> None:
    """Text, a value in code and one of a file are refused alike, each as it was written."""
    with pytest.raises(ValueError, match=r"it.* must be ") as in_text:
        kind.of_text("it", text)
    with pytest.raises(ValueError, match=r"it.* must be ") as in_code:
        kind.of_value("it", value)
    with pytest.raises(ValueError, match=r"it.* must be ") as in_file:
        kind.of_value("it", value, text)
    demands = {str(road.value).partition(", got ")[0] for road in (in_text, in_code, in_file)}
    assert len(demands) == 1


def test_a_huge_value_is_not_written_out() -> None:
    """A sentence stays one that can be read."""
    huge: Any = [1]
    for _ in range(100):
        huge = [huge] * 100
    with pytest.raises(ValueError, match="whole number") as raised:
        only("max_turns", huge)
    assert len(str(raised.value)) < 3000


def test_enable_reports_all_mistakes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence per mistake."""
    for name, text in (("MAX_TURNS", "0"), ("ACTION", "stop"), ("MAX_TURN", "5")):
        monkeypatch.setenv(f"OTEL_LIMITS_{name}", text)
    with pytest.raises(ConfigurationError) as raised:
        enable()
    assert [sentence.split(" ")[0] for sentence in raised.value.mistakes] == [
        "OTEL_LIMITS_MAX_TURNS",
        "OTEL_LIMITS_ACTION",
        "OTEL_LIMITS_MAX_TURN",
    ]


def test_a_mistake_leaves_what_was_enabled(
    monkeypatch: pytest.MonkeyPatch, make_agent: MakeAgent
) -> None:
    """`enable()` that fails changes nothing: the limits before it stay in force."""
    enable(Limits(max_turns=2))
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "abc")
    with pytest.raises(ConfigurationError):
        enable()
    model = ScriptedModel(endless(uses("search")))
    assert (make_agent(model)("go").stop_reason, model.calls) == ("max_turns", 2)


def test_a_mistake_is_logged_where_it_must_not_raise(
    monkeypatch: pytest.MonkeyPatch,
    make_agent: MakeAgent,
    metric: Metric,
    caplog: pytest.LogCaptureFixture,
    faulty: None,
) -> None:
    """The instrumentor logs one error, counts it, and enforces every other setting."""
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "abc")
    monkeypatch.setenv("OTEL_LIMITS_MAX_ITERATIONS", "2")
    OtelLimitsInstrumentor().instrument(skip_dep_check=True)
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    model = ScriptedModel(endless(uses("search")))
    result = make_agent(model)("go")
    OtelLimitsInstrumentor().uninstrument()
    assert len(errors) == 1
    assert "OTEL_LIMITS_MAX_TURNS" in errors[0]
    assert "'abc'" in errors[0]
    assert (result.stop_reason, model.calls) == ("max_iterations", 2)


@pytest.mark.parametrize(("text", "value"), [("true", True), ("TRUE", True), ("false", False)])
def test_only_true_is_true(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:  # noqa: FBT001
    """Booleans are those of OpenTelemetry."""
    monkeypatch.setenv("OTEL_LIMITS_STRICT", text)
    assert read_settings().settings.strict is value


@pytest.mark.parametrize("text", ["1", "yes", "on", "t"])
def test_other_booleans_are_false_and_a_mistake(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """None of them switches enforcement off. `run` refuses them, so no text names a default."""
    monkeypatch.setenv("OTEL_LIMITS_DISABLED", text)
    reading = read_settings()
    assert not reading.settings.disabled
    assert reading.mistakes == (f"OTEL_LIMITS_DISABLED must be true or false, got {text!r}.",)


def test_an_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """As OpenTelemetry has it."""
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "  ")
    reading = read_settings()
    assert (reading.values["max_turns"], reading.mistakes) == (None, ())


def test_disabled_is_off(monkeypatch: pytest.MonkeyPatch, make_agent: MakeAgent) -> None:
    """OTEL_LIMITS_DISABLED=true switches everything off, plugins too."""
    monkeypatch.setenv("OTEL_LIMITS_DISABLED", "true")
    enable(Limits(max_turns=1))
    model = ScriptedModel([*[uses("search")] * 3, says("done")])
    plugin = LimitsPlugin(Limits(max_turns=1))
    result = make_agent(model, plugins=[plugin])("go")
    assert (result.stop_reason, model.calls) == ("end_turn", 4)


@pytest.mark.parametrize("switch_on", [enable, partial(enable_leniently, "instrumentor")])
def test_preset_logs_its_limits(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    switch_on: Callable[[], None],
) -> None:
    """OTEL_LIMITS_PRESET=recommended sets limits where none is set, and says so in the log."""
    monkeypatch.setenv("OTEL_LIMITS_PRESET", "recommended")
    monkeypatch.setenv("OTEL_LIMITS_MAX_ITERATIONS", "7")
    switch_on()
    policy = RUNTIME.policy("any-agent")
    assert (policy.limits.max_iterations, policy.limits.max_identical_tool_calls) == (7, 5)
    assert policy.tree == Limits(max_model_calls=100)
    assert (
        "preset 'recommended' sets max_model_calls=100, max_identical_tool_calls=5, "
        "max_consecutive_tool_failures=5, max_consecutive_handoffs=20, tree_max_model_calls=100."
    ) in caplog.text


def test_code_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cap by cap: what an argument leaves open is the environment's."""
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "30")
    monkeypatch.setenv("OTEL_LIMITS_MAX_TOKEN_BUDGET", "1000")
    enable(Limits(max_turns=5))
    limits = RUNTIME.policy("any-agent").limits
    assert (limits.max_turns, limits.max_token_budget) == (5, 1000)


def test_a_configuration_error_survives_pickling() -> None:
    """A worker process can hand it to its parent."""
    error = ConfigurationError(["one.", "two."])
    copied = pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes
    assert (copied.mistakes, str(copied)) == (("one.", "two."), "one.\ntwo.")
    assert isinstance(copied, ValueError)


def test_the_stop_reasons_are_constants() -> None:
    """Their values are those of the documentation."""
    assert (
        otel_limits.MAX_ITERATIONS_STOP_REASON,
        otel_limits.MAX_TURNS_STOP_REASON,
        otel_limits.MAX_TOKEN_BUDGET_STOP_REASON,
    ) == ("max_iterations", "max_turns", "max_token_budget")


# --- caps as keywords -----------------------------------------------------------------------------


def test_enable_takes_caps_as_keywords() -> None:
    """They override those of `limits` one by one, as keywords of `dict()` do."""
    enable(Limits(max_turns=30, max_model_calls=9), max_turns=3, max_tool_calls=5)
    limits = RUNTIME.policy("any").limits
    assert limits == Limits(max_turns=3, max_model_calls=9, max_tool_calls=5)


def test_enable_with_an_invalid_keyword_changes_nothing() -> None:
    """The sentence names cap, bound and value, as that of `Limits` does."""
    enable(max_turns=2)
    with pytest.raises(ConfigurationError, match="max_turns must be a whole number of 1 or more"):
        enable(max_turns=0)
    assert RUNTIME.policy("any").limits == Limits(max_turns=2)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_turn", r"\. Did you mean max_turns\?"),
        ("tree_max_turns", r"\. Use tree=Limits\(max_turns=3\)\."),
        ("conversation_max_turn", r"\. Use conversation=Limits\(max_turns=3\)\."),
        ("ledger", r"\. Set OTEL_LIMITS_LEDGER in the environment instead\."),
        ("prometheus_prt", r"\. Set OTEL_LIMITS_PROMETHEUS_PORT in the environment instead\."),
        ("zebra", "$"),
    ],
)
def test_enable_with_an_unknown_keyword_is_a_type_error(name: str, hint: str) -> None:
    """As with any function; a misspelled cap must not be ignored."""
    unknown: Any = {name: 3}
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'{hint}"):
        enable(**unknown)


@pytest.mark.parametrize(
    ("make", "name", "hint"),
    [
        (Limits, "max_turn", "Did you mean max_turns?"),
        (Limits, "zebra", "See: otel-limits docs limits"),
        (LimitsPlugin, "max_turns", "Pass LimitsPlugin(Limits(max_turns=3))."),
        (uses, "query", "Give the arguments of a tool as arguments={'query': 3}."),
    ],
)
def test_unknown_keyword_is_refused_with_the_fix(
    make: Callable[..., object], name: str, hint: str
) -> None:
    """Python's own message has none."""
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'. {re.escape(hint)}"):
        make(**{name: 3})
