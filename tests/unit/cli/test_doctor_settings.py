"""What `otel-limits doctor` says of the settings as they are; servers have their own tests."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from otel_limits.cli.doctor.doctor_command import findings_of
from otel_limits.cli.doctor.finding import Context, Finding
from tests.price_list import listed

POLICY = """\
defaults: {limits: {max_turns: 3}}
models: {known: {price: {input: 1, output: 2}}}
"""


def found(name: str, model: str | None = None, **variables: str) -> list[Finding]:
    """Return what is found about one thing, with variables named without their prefix."""
    environ = {f"OTEL_LIMITS_{variable}": text for variable, text in variables.items()}
    return [
        each for each in findings_of("doctor", Context(environ, model=model)) if each.name == name
    ]


def only(name: str, model: str | None = None, **variables: str) -> Finding:
    """Return the one finding about something."""
    (finding,) = found(name, model, **variables)
    return finding


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A policy file."""
    path = tmp_path / "limits.yaml"
    path.write_text(POLICY)
    return path


# --- values, policy, prices -----------------------------------------------------------------------


def test_nothing_set_is_nothing_wrong() -> None:
    """Missing settings are a dash, with the hint that nothing would be halted."""
    findings = findings_of("doctor", Context({}))
    assert {each.name for each in findings if each.status == "-"} == {
        *("policy", "limits", "prices", "metrics port", "ledger", "spilled rows", "quota store"),
        "otlp",
        *(["price list"] if sys.version_info < (3, 11) else []),
    }
    assert [each.name for each in findings if each.status == "FAIL"] == []
    assert only("limits").text == "No limits set, so no agent would be halted."


@pytest.mark.parametrize("variables", [{"MAX_TURNS": "3"}, {"TREE_MAX_TURNS": "3"}])
def test_any_limit_will_do(variables: dict[str, str]) -> None:
    """Nothing is said of limits then."""
    assert found("limits", **variables) == []


def test_each_mistake_is_a_failure() -> None:
    """With the sentence that `check` has for it."""
    first, second = found("settings", MAX_TURNS="0", ACTION="explode")
    assert (first.status, second.status) == ("FAIL", "FAIL")
    assert first.text.startswith("OTEL_LIMITS_MAX_TURNS must be ")


def test_a_near_miss_of_a_name_is_a_failure() -> None:
    """Whether its prefix is misspelt or its end, with what was meant."""
    environ = {"OTEL_LIMIT_MAX_TURNS": "3", "OTEL_LIMITS_MAX_TOKEN_BUDGE": "3"}
    failures = [
        each.text for each in findings_of("doctor", Context(environ)) if each.status == "FAIL"
    ]
    assert len(failures) == 2
    for text, variable in zip(failures, ("MAX_TOKEN_BUDGET", "MAX_TURNS"), strict=True):
        assert text.endswith(f"Did you mean OTEL_LIMITS_{variable}?")


def test_disabled_is_a_failure() -> None:
    """It is easily forgotten."""
    assert found("settings", DISABLED="true")[0].status == "FAIL"


def test_a_valid_policy_is_named(policy: Path) -> None:
    """Its limits count as limits."""
    assert only("policy", POLICY=str(policy)) == Finding("ok", "policy", f"{policy} is valid.")
    assert found("limits", POLICY=str(policy)) == []


def test_a_policy_with_a_mistake_is_a_failure(policy: Path) -> None:
    """With the line."""
    policy.write_text("defaults: {limits: {max_turns: 0}}\n")
    finding = only("policy", POLICY=str(policy))
    assert (finding.status, finding.text.startswith(f"{policy}:1: ")) == ("FAIL", True)


def test_a_known_price_is_shown(policy: Path) -> None:
    """For a million tokens each way."""
    finding = only("prices", "known", POLICY=str(policy))
    assert finding.status == "ok"
    assert finding.text.startswith("known: 3.00 USD for 1M input and 1M output tokens (policy")


@listed
def test_a_price_of_short_calls_only_is_a_warning() -> None:
    """Two price lists can disagree about long prompts alone."""
    finding = only("prices", "claude-sonnet-4-5")
    price, doubt = finding.text.split(", but ")
    assert (finding.status, price) == (
        "warn",
        "claude-sonnet-4-5: 18.00 USD for 1M input and 1M output tokens (genai-prices)",
    )
    assert doubt == (
        "a long prompt has no exact price: two price lists disagree about it. Limits count at most "
        "28.50 USD for 1M input and 1M output tokens."
    )


@listed
def test_a_price_with_a_bound_is_a_warning() -> None:
    """A limit in USD holds, but the ledger has no amount."""
    finding = only("prices", "mistral-nemo", MAX_COST_USD="1")
    assert finding.status == "warn"
    assert finding.text == (
        "mistral-nemo has no exact price: two price lists disagree about it. Limits count at most "
        "0.60 USD for 1M input and 1M output tokens."
    )


def test_an_unknown_price_is_a_failure(policy: Path) -> None:
    """Its meaning depends on whether cost is limited."""
    finding = only("prices", "no-such-model", POLICY=str(policy))
    assert (finding.status, "so its cost is unknown" in finding.text) == ("FAIL", True)
    add, run = finding.advice.split(", or run: ")
    assert add == (
        'Add models["no-such-model"].price with input and output, in USD per million tokens, to '
        "the policy file"
    )
    # A list that is installed can only be upgraded, and Python 3.10 can have none.
    can_be_installed = sys.version_info >= (3, 11)
    upgrade, needs = "pip install --upgrade genai-prices", "(Python 3.11 or newer)"
    assert run.endswith(upgrade if can_be_installed else needs)
    capped = only("prices", "no-such-model", POLICY=str(policy), MAX_COST_USD="1")
    assert "so max_cost_usd does not cover it" in capped.text
    policy.write_text("models: {known: {price: {input: 1, output: 2}}}\n")
    alone = only("prices", "no-such-model", POLICY=str(policy), MAX_COST_USD="1")
    assert "so its first call halts the agent" in alone.text


# --- action ---------------------------------------------------------------------------------------


def test_observe_alone_is_a_failure() -> None:
    """The doctor's own settings halt the runaway, and nothing would halt the application."""
    finding = only("action", ACTION="observe", MAX_TURNS="3")
    assert (finding.status, finding.text) == (
        "FAIL",
        "The action is observe, so no agent would be halted.",
    )


@pytest.mark.parametrize("action", ["halt", "wrap_up", "raise", "ask"])
def test_any_other_action_is_named(action: str) -> None:
    """It is what an agent of the application gets, and the runaway does not."""
    assert only("action", ACTION=action) == Finding("ok", "action", f"{action}.")


@pytest.mark.parametrize(
    ("text", "action", "status", "said"),
    [
        ("agents: {trial: {action: observe}}", "halt", "ok", "only observed for agents 'trial'."),
        (
            "agents: {a: {action: observe}, 'b*': {action: observe}, c: {action: raise}}",
            "halt",
            "ok",
            "only observed for agents 'a', 'b*'.",
        ),
        (
            "agents: {a: {action: halt}}",
            "observe",
            "ok",
            "observed for all agents except 'a'.",
        ),
        ("agents: {a: {action: observe}}", "observe", "FAIL", "no agent would be halted."),
        ("defaults: {action: observe}", "halt", "FAIL", "no agent would be halted."),
        ("defaults: {action: halt}", "observe", "ok", "halt."),
        (
            "quotas: {day: {tokens: 9, window: day, action: halt}}",
            "observe",
            "ok",
            "observe.",
        ),
    ],
)
def test_action_of_policy_entries_is_considered(
    policy: Path, text: str, action: str, status: str, said: str
) -> None:
    """The file overrides the environment, and a quota can have its own action."""
    policy.write_text(f"{text}\n")
    finding = only("action", POLICY=str(policy), ACTION=action)
    assert (finding.status, finding.text.endswith(said)) == (status, True), finding


# --- limits in USD alone --------------------------------------------------------------------------


def test_agents_that_a_missing_price_halts_are_named(policy: Path) -> None:
    """Their models must have prices."""
    policy.write_text(
        "models: {known: {price: {input: 1, output: 2}}}\n"
        "agents: {spender: {limits: {max_cost_usd: 1}}, other: {limits: {max_turns: 1}}}\n"
    )
    finding = only("unpriced", POLICY=str(policy))
    assert finding.status == "warn"
    assert finding.text.startswith(
        "Only limits in USD halt agents 'spender', so a model call without a price halts them, too."
    )


@pytest.mark.parametrize(
    "variables",
    [{"MAX_TURNS": "3"}, {"MAX_COST_USD": "1", "MAX_TURNS": "3"}, {"UNPRICED": "halt"}, {}],
    ids=str,
)
def test_other_limits_do_not_depend_on_prices(variables: dict[str, str]) -> None:
    """There is no such line."""
    assert found("unpriced", **variables) == []


@pytest.mark.parametrize(
    ("quota", "count"), [("", 0), (", action: halt", 1)], ids=["observed", "halts"]
)
def test_observed_limits_are_not_said_to_halt(policy: Path, quota: str, count: int) -> None:
    """A call without a price halts an agent that only observes if a quota has the action halt."""
    policy.write_text(
        "models: {known: {price: {input: 1, output: 2}}}\n"
        "agents: {trial: {limits: {max_turns: 3}, action: observe}}\n"
        f"quotas: {{day: {{usd: 9, window: day, where: {{agent: trial}}{quota}}}}}\n"
    )
    assert len(found("unpriced", POLICY=str(policy))) == count


def test_a_host_that_is_none_is_a_failure() -> None:
    """Without a traceback."""
    finding = only("metrics port", PROMETHEUS_PORT="9464", PROMETHEUS_HOST="x" * 70 + ".invalid")
    assert finding.status == "FAIL"


# --- ledger ---------------------------------------------------------------------------------------


def test_a_ledger_that_can_be_written_is_not(tmp_path: Path) -> None:
    """It is neither made nor changed."""
    path = tmp_path / "new" / "ledger.db"
    assert only("ledger", LEDGER=str(path)).status == "ok"
    assert list(tmp_path.iterdir()) == []
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE t (a)")
    before = path.read_bytes()
    assert only("ledger", LEDGER=str(path)).status == "ok"
    assert path.read_bytes() == before


def test_a_ledger_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    """The error, and where rows wait until it is fixed."""
    path = tmp_path / "ledger.db"
    path.write_bytes(b"not a database, and long enough to be looked at" * 100)
    finding = only("ledger", LEDGER=str(path))
    assert (finding.status, "file is not a database" in finding.text) == ("FAIL", True)
    assert f"rows are spilled to {path}.spill-*.jsonl" in finding.advice


def test_a_ledger_below_a_file_is_a_failure(tmp_path: Path) -> None:
    """There can be no such directory."""
    (tmp_path / "file").touch()
    assert only("ledger", LEDGER=str(tmp_path / "file" / "ledger.db")).status == "FAIL"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (" ", "OTEL_LIMITS_LEDGER is not set; otel-limits run would use {default}."),
        ("None", "OTEL_LIMITS_LEDGER is none, so nothing is recorded."),
        ("mysql://host/db", "OTEL_LIMITS_LEDGER is invalid, so nothing is recorded."),
    ],
    ids=["unset", "none", "invalid"],
)
def test_missing_ledger_has_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, text: str
) -> None:
    """Only an unset one is replaced by `otel-limits run`."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    finding = only("ledger", LEDGER=given)
    default = tmp_path / "otel-limits" / "ledger.db"
    assert (finding.status, finding.text) == ("-", text.format(default=default))


def test_waiting_rows_are_reported(tmp_path: Path) -> None:
    """With their file and the process that imports them."""
    path = tmp_path / "ledger.db"
    spilled = tmp_path / "ledger.db.spill-1.jsonl"
    spilled.write_text('["a", {}]\n')
    finding = only("spilled rows", LEDGER=str(path))
    assert finding.status == "ok"
    assert finding.text == f"10 bytes in {spilled}."


def test_user_without_a_home_directory_has_no_default_ledger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in many containers: `otel-limits run` records nothing, and all else is checked."""

    def home() -> Path:
        raise RuntimeError

    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    finding = only("ledger")
    assert (finding.status, finding.text) == (
        "-",
        "OTEL_LIMITS_LEDGER is not set; otel-limits run would use none.",
    )
    assert finding.advice.startswith("No home directory for the default ledger. Set HOME, or a ")
    assert only("spilled rows").text == "No spilled rows."
