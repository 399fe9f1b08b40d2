"""The command line itself: what `check` says, what help there is, which mistakes are found."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from otel_limits import docs
from otel_limits.cli import main, run_command
from otel_limits.cli.check import folded
from otel_limits.core.values import BOOLEAN
from otel_limits.settings.children import ON_PATH, environment_for_run
from otel_limits.settings.table import SETTINGS
from otel_limits.settings.variables import otlp_protocol
from tests.price_list import listed

ESCAPE = "\x1b"


@pytest.fixture
def check(
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, dict[str, str], list[str]]]:
    """Run `otel-limits check`: its status, each setting's line, and mistakes on stderr.

    Without the warnings that most tests would get.
    """

    def run(*arguments: str) -> tuple[int, dict[str, str], list[str]]:
        status = main(["check", *arguments])
        captured = capsys.readouterr()
        # Without what depends on the environment.
        installed = ("price_list ", "strands ", "langchain ", "openai-agents ", "Frameworks ")
        lines = (
            line.split(maxsplit=1)
            for line in captured.out.splitlines()
            if not line.startswith(installed)
        )
        usual = ("No limits set", "can change policy file")
        said = [
            line
            for line in captured.err.splitlines()
            if not any(phrase in line for phrase in usual)
        ]
        return status, dict(lines), said

    return run


Check = Callable[..., tuple[int, dict[str, str], list[str]]]


def test_check_all_prints_every_setting(check: Check) -> None:
    """Each variable has a line, even if none is set."""
    status, lines, mistakes = check("--all")
    assert (status, mistakes) == (0, [])
    assert list(lines) == [setting.variable for setting in SETTINGS]


def test_unknown_variable_names_the_command_that_lists_all(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that resembles none can only be looked up among all settings."""
    monkeypatch.setenv("OTEL_LIMITS_XYZZY", "1")
    (mistake,) = check()[2]
    assert mistake.endswith("is not a setting of otel-limits. See: otel-limits check --all")


def test_check_prints_what_is_set_and_what_follows(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings, the limits of a preset, the action at a limit, and how to see the rest."""
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "30")
    monkeypatch.setenv("OTEL_LIMITS_PRESET", "recommended")
    _, lines, _ = check()
    assert {name: line.split(maxsplit=1) for name, line in lines.items()} == {
        "OTEL_LIMITS_MAX_ITERATIONS": ["25", "preset recommended"],
        "OTEL_LIMITS_MAX_TURNS": ["30", "environment"],
        "OTEL_LIMITS_MAX_MODEL_CALLS": ["100", "preset recommended"],
        "OTEL_LIMITS_MAX_IDENTICAL_TOOL_CALLS": ["5", "preset recommended"],
        "OTEL_LIMITS_MAX_CONSECUTIVE_TOOL_FAILURES": ["5", "preset recommended"],
        "OTEL_LIMITS_MAX_CONSECUTIVE_HANDOFFS": ["20", "preset recommended"],
        "OTEL_LIMITS_TREE_MAX_MODEL_CALLS": ["100", "preset recommended"],
        "OTEL_LIMITS_ACTION": ["halt", "default"],
        "OTEL_LIMITS_PRESET": ["recommended", "environment"],
        str(len(SETTINGS) - 9): ["settings", "with defaults: otel-limits check --all"],
    }


def test_check_reads_the_options_of_run(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command line is checked before a program is started with it."""
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "30")
    status, lines, (mistake,) = check("--max-turns", "5", "--max-cost-usd", "nine")
    assert lines["OTEL_LIMITS_MAX_TURNS"].split() == ["5", "option"]
    assert status == 1
    assert mistake.startswith("otel-limits: --max-cost-usd must be ")


def test_check_without_settings_names_the_option(check: Check) -> None:
    """There is nothing to list but the option that lists the defaults."""
    _, lines, _ = check()
    assert list(lines) == [str(len(SETTINGS))]


def test_check_names_the_variables_behind_a_default(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenTelemetry's own variables add an exporter."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    _, lines, _ = check()
    assert lines["OTEL_LIMITS_METRICS"].split() == ["otlp,prometheus", "OTEL_EXPORTER_OTLP_*"]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        *(("OTEL_LIMITS_MAX_TURNS", value) for value in ("abc", "0", "-1", "2.5", "1e3", "٣")),
        ("OTEL_LIMITS_MAX_TOKEN_BUDGET", "100_000"),
        ("OTEL_LIMITS_ACTION", "stop"),
        ("OTEL_LIMITS_PRESET", "best"),
        ("OTEL_LIMITS_STRICT", "yes"),
        ("OTEL_LIMITS_PROMETHEUS_PORT", "70000"),
    ],
)
def test_check_finds_a_bad_value(
    check: Check, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """Status 1, and one sentence that names the variable and the value."""
    monkeypatch.setenv(variable, value)
    status, lines, mistakes = check()
    assert (status, len(mistakes)) == (1, 1)
    assert mistakes[0].startswith(f"otel-limits: {variable} must be ")
    assert f"got {value!r}." in mistakes[0]
    assert lines[variable].endswith("default (environment value is invalid)")


def test_check_lists_agents_and_quotas_of_the_policy_file(
    check: Check, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Limits on tokens are shown, and a quota without a shared store is one for each process."""
    policy = tmp_path / "limits.yaml"
    policy.write_text(
        "agents: {writer: {limits: {max_token_budget: 500, max_turns: 3}}}\n"
        "quotas: {users: {model_calls: 6, window: day, key: agent}}\n"
    )
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    _, lines, _ = check()
    assert lines['agents["writer"]'].startswith("max_token_budget=500,max_turns=3 ")
    assert (
        "6 model calls per day for each agent, counted in each process "
        in (lines['quotas["users"]'])
    )
    _, lines, said = check("--agent", "wrter")
    assert 'agents["writer"]' not in lines
    assert "otel-limits: The policy file names 'writer', not 'wrter'." in said


@listed
def test_check_names_agents_that_a_missing_price_halts(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning, because the limit holds."""
    monkeypatch.setenv("OTEL_LIMITS_MAX_COST_USD", "1")
    status, _, said = check()
    assert (status, len(said)) == (0, 1)
    assert "Only limits in USD halt agents, so a model call without a price halts them" in said[0]
    monkeypatch.setenv("OTEL_LIMITS_UNPRICED", "warn")
    assert check()[2] == []


def test_check_finds_a_variable_that_is_no_setting(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A typing error is no limit."""
    monkeypatch.setenv("OTEL_LIMITS_MAXTURNS", "30")
    status, _, mistakes = check()
    assert (status, len(mistakes)) == (1, 1)
    assert "OTEL_LIMITS_MAXTURNS is not a setting of otel-limits." in mistakes[0]


@pytest.mark.parametrize(
    ("variable", "value", "command"),
    [
        ("OTEL_LIMITS_AUDIT_KEYS", "a b", "ledger import spans.jsonl"),
        ("OTEL_LIMITS_POLCY", "limits.yaml", "ledger import spans.jsonl"),
        ("OTEL_LIMITS_BILLING_ACCOUNTS", "1", "ledger export --focus"),
        ("OTEL_LIMITS_PROMETHEUS_PORT", "70000", "top --once"),
        ("OTEL_LIMITS_QUOTA_STORE", "redsi://h", "kill --agent a"),
    ],
)
def test_command_refuses_a_mistake_in_what_it_reads(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    command: str,
) -> None:
    """With the default, its answer would be another one than that of the agents' processes."""
    monkeypatch.setenv(variable, value)
    assert main(command.split()) == 2
    assert variable in capsys.readouterr().err


def test_check_reports_all_mistakes_together(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence each; valid settings next to them keep their value."""
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "abc")
    monkeypatch.setenv("OTEL_LIMITS_ACTION", "stop")
    monkeypatch.setenv("OTEL_LIMITS_MAX_ITERATIONS", "7")
    status, lines, mistakes = check()
    assert (status, len(mistakes)) == (1, 2)
    assert lines["OTEL_LIMITS_MAX_ITERATIONS"].split(maxsplit=1) == ["7", "environment"]


def test_an_empty_variable_is_unset(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """As OpenTelemetry has it."""
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "")
    assert check("--all")[1]["OTEL_LIMITS_MAX_TURNS"].split(maxsplit=1) == ["unset", "default"]


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("OTEL_LIMITS_DISABLED", "TRUE", "true"),
        ("OTEL_LIMITS_WARN_AT", "0.8,0.5", "0.5,0.8"),
        ("OTEL_LIMITS_EXEMPT_TOOLS", "wait, poll", "poll,wait"),
        ("OTEL_LIMITS_MAX_CALLS_PER_TOOL", "search=20", "search=20"),
        ("OTEL_LIMITS_MAX_COST_USD", "0.50", "0.50"),
        ("OTEL_LIMITS_PROMETHEUS_HOST", "h" * 150, "h" * 150),
    ],
)
def test_values_are_shown_whole_and_as_variables_have_them(
    check: Check, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: str
) -> None:
    """Printed values can be set again; nothing is cut off."""
    monkeypatch.setenv(variable, value)
    assert check()[1][variable].split(maxsplit=1)[0] == expected


def test_long_value_is_broken_behind_commas() -> None:
    """A number in two halves would be read as another."""
    value = "cache_read=1.25,input=2.50,output=10.00"
    assert folded(value, 38).splitlines() == ["cache_read=1.25,input=2.50,", "output=10.00"]


def test_elsewhere_settings_are_plain_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No colors, even where the environment forces them."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    main(["check"])
    assert ESCAPE not in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        "run",
        "autoload",
        "check",
        "doctor",
        "demo",
        "audit",
        "ledger",
        "dashboards",
        "quotas",
        "kill",
        "docs",
    ],
)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In the list of commands, and with its own --help."""
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    listed = capsys.readouterr().out
    assert re.search(rf"^ +{command}\s+[A-Z]\w+ ", listed, re.MULTILINE)
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: otel-limits {command} ")


def test_run_help_has_one_option_per_setting_except_secrets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A new setting gets an option. Secrets would be visible in the list of processes."""
    with pytest.raises(SystemExit, match="0"):
        main(["run", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    for setting in SETTINGS:
        flag = f"--[no-]{setting.flag[2:]}" if setting.kind is BOOLEAN else setting.flag
        assert (f" {flag} " in words) is not setting.is_secret
        assert (run_command.summary(setting) in words) is not setting.is_secret


def test_run_help_fits_two_screens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 100 columns and about 60 lines each, its groups can be found at a glance."""
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit, match="0"):
        main(["run", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert [f"{title}:" for title in run_command.GROUPS] == [
        line for line in lines if line.removesuffix(":") in run_command.GROUPS
    ]
    assert len(lines) <= 134, "shorten the help of a setting in settings/table.py or core/"


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """It is distinct from a bare number."""
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert re.fullmatch(r"otel-limits \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error, and with the status of a mistake."""
    assert main([]) == 2
    assert "usage: otel-limits" in capsys.readouterr().err


@pytest.mark.parametrize("group", ["audit", "autoload", "ledger", "dashboards"])
def test_a_group_without_a_command_shows_its_help(
    group: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On standard error, and with the status of a mistake."""
    assert main([group]) == 2
    assert capsys.readouterr().err.startswith(f"usage: otel-limits {group} ")


# --- docs -----------------------------------------------------------------------------------------


def test_docs_lists_every_page_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    """A reader finds the page that answers a question, and a new page is not forgotten."""
    assert main(["docs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line[0] != " "] == [f"{group}:" for group in docs.PAGES]
    listed = [line.split()[0] for line in lines if line[0] == " "]
    folder = Path(str(docs.__file__)).parent
    assert sorted(listed) == sorted({path.stem for path in folder.glob("*.md")} - {"README"})


@pytest.mark.parametrize("topic", docs.topics())
def test_docs_without_terminal_prints_markdown(
    topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Users can pipe a page to their own renderer."""
    assert main(["docs", topic]) == 0
    assert capsys.readouterr().out == docs.page(topic)


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        (f"{docs.topics()[0]}x", f"Did you mean {docs.topics()[0]}?"),
        ("0000", f"Pages: {', '.join(docs.topics())}."),
    ],
)
def test_docs_unknown_page_suggests_existing_ones(
    asked: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The closest match, or all of them."""
    assert main(["docs", asked]) == 2
    assert capsys.readouterr().err == f"otel-limits: No page named {asked!r}. {hint}\n"


# --- starting a program ---------------------------------------------------------------------------

HOOK = str(ON_PATH)


@pytest.mark.parametrize(
    ("inherited", "path"),
    [
        ({}, [HOOK]),
        ({"PYTHONPATH": ""}, [HOOK]),
        ({"PYTHONPATH": "/a"}, [HOOK, "/a"]),
        ({"PYTHONPATH": f"/a{os.pathsep}"}, [HOOK, "/a", ""]),
        ({"PYTHONPATH": f"/a{os.pathsep}{HOOK}"}, [HOOK, "/a"]),
    ],
)
def test_the_path_of_a_program_is_kept_behind_us(
    inherited: dict[str, str], path: list[str]
) -> None:
    """Once, and also an empty entry, which means the current directory."""
    assert environment_for_run(inherited)["PYTHONPATH"].split(os.pathsep) == path


@pytest.mark.parametrize(
    ("environ", "protocol"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, "http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "grpc"),
        (
            {
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            },
            "http/protobuf",
        ),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://collector:4318"}, None),
        ({"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://collector:4318"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, None),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318",
                "OTEL_TRACES_EXPORTER": "console,otlp",
            },
            "http/protobuf",
        ),
    ],
)
def test_traces_are_exported_when_the_environment_asks_for_it(
    environ: dict[str, str], protocol: str | None
) -> None:
    """Not for what is said of metrics and logs alone, nor against OTEL_TRACES_EXPORTER."""
    assert otlp_protocol(environ) == protocol


def test_check_warns_of_a_quota_below_a_single_call(
    check: Check, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which is not a mistake: such a quota admits one call at a time."""
    path = tmp_path / "limits.yaml"
    path.write_text("quotas: {small: {tokens: 1000, window: day}}")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))
    status, _, (sentence,) = check()
    assert status == 0
    assert 'quotas["small"] is 1,000 tokens, less than the 4,096' in sentence


@pytest.mark.parametrize(
    ("quota", "warnings"),
    [
        ("model_calls: 9, window: day", 1),
        ("model_calls: 9, window: PT30S", 0),
        ("invocations: 9, window: day", 1),
        ("tokens: 9_000, window: day", 0),
        ("concurrency: 9", 0),
    ],
)
def test_check_warns_of_a_quota_that_calls_wait_for_in_vain(
    check: Check, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, warnings: int
) -> None:
    """Used calls return only in the next window, unlike tokens that were reserved but not used."""
    path = tmp_path / "limits.yaml"
    path.write_text(f"quotas: {{q: {{{quota}, on_exceeded: wait}}}}")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))
    status, _, sentences = check()
    assert status == 0
    assert len(sentences) == warnings
    assert all('quotas["q"] lets calls wait up to 30 s' in each for each in sentences)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_help_fits_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No terminal has to break a word of it; examples stay on one line each, to be copied."""
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    lines = capsys.readouterr().out.splitlines()
    described = lines[: lines.index("options:")]
    example = (
        "  otel-limits run --max-token-budget 100000 --prometheus-port 9464 -- uvicorn app:app"
    )
    assert example in described
    assert max(len(line) for line in described if line != example) <= width
