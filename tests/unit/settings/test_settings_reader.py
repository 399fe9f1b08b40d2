"""Settings are read whatever they say: a sentence per mistake, and every other one in force."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import otel_limits
from otel_limits import ConfigurationError, enable
from otel_limits.cli import main
from otel_limits.core.limits import PREFIX
from otel_limits.core.values import CheckedKind
from otel_limits.settings.settings_reader import VARIABLES, near_misses, read_settings
from otel_limits.settings.table import POLICY_FIELDS, PROCESS_FIELDS, SETTINGS
from otel_limits.testing import ScriptedModel, says, uses

if TYPE_CHECKING:
    from tests.conftest import MakeAgent

HOMELESS = "No home directory."


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a user whom the machine does not know."""

    def home() -> Path:
        raise RuntimeError(HOMELESS)

    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)


@pytest.mark.parametrize("command", ["check", "audit spend", "run -- true"])
def test_no_command_shows_a_traceback(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends with a sentence."""
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", "~nosuchuser/l.db")
    assert main(command.split()) != 0
    assert "OTEL_LIMITS_LEDGER is '~nosuchuser/l.db'" in capsys.readouterr().err


@pytest.mark.usefixtures("homeless")
def test_a_whole_path_needs_no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where a ledger lies is known without one."""
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", str(tmp_path / "l.db"))
    reading = read_settings()
    assert reading.mistakes == ()
    assert reading.settings.ledger is not None
    assert reading.settings.ledger.spills[0] == tmp_path / "l.db"


@pytest.mark.usefixtures("homeless")
def test_a_question_without_home_or_ledger_is_answered_with_a_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It says what to set."""
    assert main(["audit", "spend"]) == 2
    assert "No home directory for the default ledger." in capsys.readouterr().err


@pytest.mark.parametrize("error", [RuntimeError, KeyError, OSError, RecursionError, MemoryError])
def test_unexpected_error_is_one_mistake(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other setting is in force, and the message quotes nothing of the value."""

    def fail(_text: object) -> Any:
        raise error("hunter2")

    broken = CheckedKind(phrase="x", check=fail, parse=fail)
    changed = tuple(
        dataclasses.replace(each, kind=broken) if each.name == "preset" else each
        for each in SETTINGS
    )
    monkeypatch.setattr("otel_limits.settings.settings_reader.SETTINGS", changed)
    monkeypatch.setenv("OTEL_LIMITS_PRESET", "hunter2")
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "3")
    reading = read_settings()
    assert reading.mistakes == (f"OTEL_LIMITS_PRESET cannot be read ({error.__name__}).",)
    assert reading.settings.policy.limits.max_turns == 3


def test_invalid_pattern_is_shown_without_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any text may be in a variable, also one that belongs in another."""
    monkeypatch.setenv("OTEL_LIMITS_TOOL_FAILURES", "redis://u:hunter2@h/[")
    (mistake,) = read_settings().mistakes
    assert "The pattern 'redis://u:***@h/[' is invalid" in mistake
    assert "hunter2" not in mistake


@pytest.mark.parametrize("name", [*PROCESS_FIELDS, *POLICY_FIELDS])
def test_every_setting_is_used(name: str) -> None:
    """A setting that no code reads would be accepted and do nothing."""
    used = re.compile(rf"\.{name}\b|{PREFIX}{name.upper()}\b")
    files = Path(otel_limits.__file__).parent.rglob("*.py")
    assert any(used.search(file.read_text(encoding="utf-8")) for file in files), (
        f"no code reads the setting {name}"
    )


# --- names ----------------------------------------------------------------------------------------


def test_a_name_that_is_not_ours_is_refused_with_a_question(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In code, and by `check`."""
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURN", "3")
    sentence = (
        "OTEL_LIMITS_MAX_TURN is not a setting of otel-limits. Did you mean OTEL_LIMITS_MAX_TURNS?"
    )
    with pytest.raises(ConfigurationError, match="Did you mean OTEL_LIMITS_MAX_TURNS"):
        enable()
    assert main(["check"]) == 1
    assert sentence in capsys.readouterr().err


NEAR = {
    "OTEL_LIMIT_MAX_TURNS": "OTEL_LIMITS_MAX_TURNS",
    "OTELLIMITS_MAX_TURNS": "OTEL_LIMITS_MAX_TURNS",
    "OTEL_LIMTS_MAX_TURNS": "OTEL_LIMITS_MAX_TURNS",
    "OTEL_LMITS_MAX_TURNS": "OTEL_LIMITS_MAX_TURNS",
    "otel_limits_max_turns": "OTEL_LIMITS_MAX_TURNS",
    "OTEL-LIMITS-MAX-TURNS": "OTEL_LIMITS_MAX_TURNS",
    "O_TEL_LIMITS_MAX_TURNS": "OTEL_LIMITS_MAX_TURNS",
    "_OTEL_LIMITS_MAX_TURNS": "OTEL_LIMITS_MAX_TURNS",
    "OTLE_LIMITS_STRICT": "OTEL_LIMITS_STRICT",
    "OTEL_LIMIT_MAX_TURN": "OTEL_LIMITS_MAX_TURNS",
}


@pytest.mark.parametrize("name", NEAR)
def test_a_prefix_that_is_almost_ours_is_asked_about(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    warnings_logged: Any,
) -> None:
    """One warning where it is switched on; `check` says the same and ends with status 1."""
    monkeypatch.setenv(name, "3")
    sentence = (
        f"{name} is not a setting of otel-limits: its variables start with OTEL_LIMITS_. "
        f"Did you mean {NEAR[name]}?"
    )
    enable()
    assert [each for each in warnings_logged() if name in each] == [f"otel-limits: {sentence}"]
    assert main(["check"]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        "OTEL_SDK_DISABLED",
        "OTEL_ATTRIBUTE_COUNT_LIMIT",
        "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT",
        "OTEL_METRICS_EXPORTER",
        "OTEL_LOG_LEVEL",
        "LIMITS_MAX_TURNS",
        "LIMIT_ACTION",
        "RATE_LIMITS_POLICY",
        "HOTEL_LIMITS_SINGLES",
        "ULIMIT_STRICT",
        "DELIMITER",
    ],
)
def test_third_party_variables_are_ignored(name: str) -> None:
    """Names of OpenTelemetry or of another product."""
    assert near_misses({name: "3"}) == []


@pytest.mark.parametrize("signal", ["", "TRACES_", "METRICS_", "LOGS_"])
def test_timeout_in_milliseconds_is_reported(monkeypatch: pytest.MonkeyPatch, signal: str) -> None:
    """The specification says milliseconds, and Python's exporters read seconds."""
    name = f"OTEL_EXPORTER_OTLP_{signal}TIMEOUT"
    monkeypatch.setenv(name, "10000")
    (warning,) = read_settings().warnings
    assert warning == (
        f"{name} is 10,000 seconds: the exporters of Python read seconds, although the "
        "specification of OpenTelemetry says milliseconds. For 10 seconds, set it to 10."
    )


@pytest.mark.parametrize("text", ["", "10", "999", "soon"])
def test_timeout_in_seconds_is_not_reported(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Up to a quarter of an hour; a mistake in it is reported by the exporters."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", text)
    assert read_settings().warnings == ()


@pytest.mark.parametrize(
    "name",
    [
        "SERVICE_HOST",
        "SERVICE_PORT",
        "SERVICE_PORT_METRICS",
        "PORT",
        "PORT_9464_TCP",
        "PORT_9464_TCP_PROTO",
        "PORT_9464_TCP_PORT",
        "PORT_9464_TCP_ADDR",
        "PORT_53_UDP_ADDR",
    ],
)
def test_kubernetes_service_variables_are_ignored(name: str) -> None:
    """A Kubernetes Service named otel-limits gives these to every container."""
    reading = read_settings({f"OTEL_LIMITS_{name}": "tcp://10.0.0.11:9464"})
    assert (reading.mistakes, reading.warnings) == ((), ())


def test_limits_hold_beside_such_a_service(
    monkeypatch: pytest.MonkeyPatch, make_agent: MakeAgent
) -> None:
    """Nothing is refused."""
    monkeypatch.setenv("OTEL_LIMITS_PORT", "tcp://10.0.0.11:9464")
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "3")
    enable()
    model = ScriptedModel([uses("search")] * 5 + [says("done")])
    assert make_agent(model)("go").stop_reason == "max_turns"
    assert model.calls == 3


def test_each_setting_that_is_a_path_can_be_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that cron starts has another directory. URLs and words are no paths."""
    monkeypatch.chdir(tmp_path)
    found = {name for name, each in VARIABLES.items() if each.kind.absolute("a.db") != "a.db"}
    assert found == {"OTEL_LIMITS_LEDGER", "OTEL_LIMITS_POLICY", "OTEL_LIMITS_TOOL_LOG_DIR"}
    absolute = VARIABLES["OTEL_LIMITS_LEDGER"].kind.absolute
    assert absolute("a.db") == str(tmp_path / "a.db")
    assert absolute("sqlite:///a.db") == f"sqlite:///{tmp_path / 'a.db'}"
    for text in ("none", "postgresql://host/db", "mysql://host/db", "/a.db", "sqlite:////a.db"):
        assert absolute(text) == text


def test_an_empty_path_is_not_a_file() -> None:
    """As of `--policy "$POLICY"` without that variable; an empty variable is unset."""
    for variable in ("OTEL_LIMITS_POLICY", "OTEL_LIMITS_TOOL_LOG_DIR"):
        with pytest.raises(ValueError, match="--option must name a file or a directory, got ''"):
            VARIABLES[variable].kind.of_text("--option", "")
