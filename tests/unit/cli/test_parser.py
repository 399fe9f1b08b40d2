"""Misspelt options are rejected, with a suggestion of the closest name."""

from __future__ import annotations

import io
import itertools
import os
import re
import shlex
from argparse import ArgumentParser, BooleanOptionalAction
from collections.abc import Iterator
from typing import Any

import pytest

from otel_limits.cli import main
from otel_limits.cli.check import print_table
from otel_limits.cli.parser import make_parser
from otel_limits.core.wording import closest_match
from tests.rules import over


def commands_below(parser: ArgumentParser, *above: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that there is, with its parser."""
    yield above, parser
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for name, below in action.choices.items():
                yield from commands_below(below, *above, name)


PARSER = make_parser()
OPTIONS = {
    f"{' '.join(words)} {option}": (words, option)
    for words, parser in commands_below(PARSER)
    for action in parser._actions
    for option in action.option_strings
    if option.startswith("--")
}


CHOICES = {
    f"{' '.join(words)} {choice}": (words, str(choice))
    for words, parser in commands_below(PARSER)
    for action in parser._actions
    if action.choices and not action.option_strings
    for choice in action.choices
}


OPTION_CHOICES = {
    f"{' '.join(words)} {action.option_strings[-1]} {choice}": (
        *(words, action.option_strings[-1]),
        str(choice),
    )
    for words, parser in commands_below(PARSER)
    for action in parser._actions
    if action.choices and action.option_strings
    for choice in action.choices
}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the last line that a refused command line is answered with."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_run_asks_about_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    """The answer names the command, what was typed, and what there is."""
    assert refusal(capsys, "run", "--max-turn", "3", "--", "python", "app.py") == (
        "otel-limits run: error: unrecognized arguments: --max-turn. Did you mean --max-turns?"
    )


def test_a_value_that_is_attached_is_no_part_of_the_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """However long it is."""
    value = "/a/long/path/to/a/ledger.db"
    said = refusal(capsys, "run", f"--leger={value}", "--", "python")
    assert said.endswith("Did you mean --ledger?")


@pytest.mark.parametrize(
    ("typed", "option"),
    [
        ("--turns", "--max-turns"),
        ("--cost-usd", "--max-cost-usd"),
        ("--tool-calls", "--max-tool-calls"),
    ],
)
def test_the_end_of_a_name_is_asked_about(
    typed: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shortest name that ends so."""
    said = refusal(capsys, "run", typed, "3", "--", "python")
    assert said.endswith(f"Did you mean {option}?")


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (("--max-turns", "3", "run", "--", "python"), "otel-limits"),
        (("ledger", "--older-than", "3d", "prune"), "otel-limits ledger"),
    ],
)
def test_option_before_its_command_is_said_to_belong_after_it(
    words: tuple[str, ...], program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its value would otherwise be called an unknown command."""
    option = next(word for word in words if word.startswith("--"))
    assert refusal(capsys, *words) == (
        f"{program}: error: {option} belongs after the command: {program} COMMAND {option} ..."
    )


@over(OPTIONS, "words", "option")
def test_every_option_of_every_command_is_asked_about(
    words: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a letter twice in its name; also where what is required is not given."""
    misspelt = option[:3] + option[2:]
    assert refusal(capsys, *words, misspelt).endswith(f"Did you mean {option}?")


def test_option_without_a_close_match_is_rejected_without_suggestion(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A guess that is none would lead astray."""
    said = refusal(capsys, "check", "--xyzzy")
    assert said == "otel-limits check: error: unrecognized arguments: --xyzzy"


@pytest.mark.parametrize("value", ["abc", "--"])
def test_the_options_of_a_program_are_its_own(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are not looked at, whatever they are near."""
    assert main(["run", "--max-turns", "abc", "--", "absent", "--max-turn", value]) == 2
    assert "Did you mean" not in capsys.readouterr().err


SWITCHES = {
    action.option_strings[0]: action.option_strings
    for words, parser in commands_below(PARSER)
    for action in parser._actions
    if words == ("run",) and isinstance(action, BooleanOptionalAction)
}

VALUES = itertools.cycle(("true", "FALSE", "yes", "no", "on", "1", "0"))
"""Every form of a mistake meets every value, each with another switch."""


@over(SWITCHES, "on", "off")
def test_a_switch_takes_no_value(on: str, off: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The word after it is the program: `true` would run in place of the application."""
    for form in (f"{on} VALUE", f"{off} VALUE", f"{on}=VALUE", f"--max-turns 3 {on} VALUE"):
        value = next(VALUES)
        typed = form.replace("VALUE", value).split()
        said = refusal(capsys, "run", *typed, "--", "python", "app.py")
        assert f" takes no value, got '{value}'. Write {on} to switch it on, {off} " in said


@pytest.mark.parametrize(
    ("typed", "program"),
    [
        ("--quiet -- true", "true"),
        ("--quiet --max-turns 3 true", "true"),
        ("--quiet sh -- tests", "sh -- tests"),
        ("--quiet sh --quiet 1", "sh --quiet 1"),
    ],
)
def test_a_program_may_have_the_name_of_a_value(
    typed: str, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `--` or the value of another option; its own options are not looked at."""
    started: list[str] = []

    def replace_process(command: list[str], _environ: object) -> tuple[int, str]:
        started.extend(command)
        return 0, ""

    monkeypatch.setattr("otel_limits.cli.run_command.replace_process", replace_process)
    # Both would start the program.
    monkeypatch.setattr("otel_limits.cli.run_command.is_other_program", lambda *_: False)
    monkeypatch.setattr("otel_limits.cli.run_command.isolation_problem", lambda *_: None)
    assert main(["run", *typed.split()]) == 0
    assert started == program.split()


def test_a_missing_value_is_no_misspelling(capsys: pytest.CaptureFixture[str]) -> None:
    """The option is known."""
    said = refusal(capsys, "run", "--max-turns")
    assert said == "otel-limits run: error: argument --max-turns: expected one argument"


@over(CHOICES, "words", "choice")
def test_every_command_and_every_word_is_asked_about(
    words: tuple[str, ...], choice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a letter twice in its name: commands, their commands, and questions."""
    said = refusal(capsys, *words, choice[:2] + choice[1:])
    assert said.endswith(f"Did you mean {choice}?")


@over(OPTION_CHOICES, "words", "option", "choice")
def test_every_choice_of_every_option_is_asked_about(
    words: tuple[str, ...], option: str, choice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the option itself is right."""
    said = refusal(capsys, *words, option, choice[:2] + choice[1:])
    assert said.endswith(f"Did you mean {choice}?")


@pytest.mark.parametrize(
    ("option", "value", "hint"),
    [
        ("--action", "wrapup", "wrap_up"),
        ("--metrics", "otpl", "otlp"),
        ("--preset", "recomended", "recommended"),
    ],
)
def test_the_word_of_a_setting_is_asked_about(
    option: str, value: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same sentence as for its variable and in the policy file."""
    assert main(["run", option, value, "--", "absent"]) == 2
    assert capsys.readouterr().err.endswith(f"Did you mean {hint}?\n")


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("colour", None),  # not `hour`
        ("dya", "day"),
        ("agents", "agent"),
        ("tenant", "tenant.id"),
        ("HOUR", "hour"),
        ("tsakname", None),
        ("", None),
    ],
)
def test_only_what_is_near_is_asked_about(typed: str, hint: str | None) -> None:
    """A question about another thing leads astray."""
    assert (
        closest_match(typed, ["agent", "model", "tool", "tenant.id", "day", "hour", "month"])
        == hint
    )


def test_shared_prefix_of_names_is_ignored_in_matching() -> None:
    """The shared prefix of our variables is longer than most of their names."""
    known = ["OTEL_LIMITS_QUIET", "OTEL_LIMITS_STRICT", "OTEL_LIMITS_MAX_TOKEN_BUDGET"]
    assert closest_match("OTEL_LIMITS_FOO", known) is None
    assert closest_match("OTEL_LIMITS_MAX_TOKENS", known) == "OTEL_LIMITS_MAX_TOKEN_BUDGET"


def test_a_time_zone_is_asked_about(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an option and as a variable."""
    assert main(["audit", "spend", "--time-zone", "Europe/Berln"]) == 2
    monkeypatch.setenv("OTEL_LIMITS_TIME_ZONE", "europe/berlin")
    assert main(["check"]) == 1
    assert main(["audit", "spend", "--time-zone", "Berlin"]) == 2
    assert capsys.readouterr().err.count("Did you mean Europe/Berlin?") == 3


def test_a_topic_is_asked_about(capsys: pytest.CaptureFixture[str]) -> None:
    """A page of the documentation."""
    assert main(["docs", "limts"]) == 2
    assert capsys.readouterr().err.endswith("Did you mean limits?\n")


# --- examples -------------------------------------------------------------------------------------

COMMANDS = {" ".join(words): (words, parser) for words, parser in commands_below(PARSER)}


@over(COMMANDS, "words", "parser")
def test_every_help_has_an_example_that_can_be_typed(
    words: tuple[str, ...], parser: ArgumentParser
) -> None:
    """Each line that begins with the command is one that its parser understands."""
    begin = " ".join(("otel-limits", *words))
    lines = [line.strip() for line in parser.format_help().splitlines() if line.startswith("  ")]
    examples = [line for line in lines if line.startswith(f"{begin} ") or line == begin]
    typed = [line for line in examples if "TOPIC" not in line]
    assert typed
    for line in typed:
        arguments = shlex.split(re.split(r" [|>] ", line)[0])[1:]
        assert PARSER.parse_args(arguments).call is not None


# --- colours --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_nothing_is_in_colour_where_none_is_wanted(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words are the same as in colour: it never says anything by itself."""
    shown = {}
    for colours in (True, False):
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("TERM", "xterm-256color")
        if not colours:
            monkeypatch.setenv(variable, value)
        screen = io.StringIO()
        monkeypatch.setattr(screen, "isatty", lambda: True)
        monkeypatch.setattr("sys.stdout", screen)
        print_table([("OTEL_LIMITS_MAX_TURNS", "3", "environment")])
        shown[colours] = screen.getvalue()
    plain = {colours: re.sub(r"\x1b\[[\d;]*m", "", text) for colours, text in shown.items()}
    assert plain[True].split() == plain[False].split()
    assert not re.search(r"\x1b\[[\d;]*3\d", shown[False])


@pytest.mark.parametrize("columns", [60, 100])
def test_no_help_cuts_a_name_at_its_hyphen(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name at the end of a line can still be copied and found by a search."""
    monkeypatch.setenv("COLUMNS", str(columns))
    cut = {
        line
        for _, parser in commands_below(PARSER)
        for line in parser.format_help().splitlines()
        if re.search(r"\w-$", line)
    }
    assert cut == set()


def test_a_negative_number_is_not_a_misspelt_option(capsys: pytest.CaptureFixture[str]) -> None:
    """The message contains only the valid range."""
    with pytest.raises(SystemExit):
        main(["audit", "spend", "--top", "-1"])
    assert capsys.readouterr().err.endswith("must be a whole number of 1 or more, got '-1'.\n")


@pytest.mark.parametrize("value", ["t", "y", "enabled"])
@pytest.mark.parametrize("switch", ["--disabled", "--no-budget-hints"])
def test_word_after_a_switch_that_is_no_command_is_refused(
    switch: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is meant as the value, which "command not found" would not explain."""
    with pytest.raises(SystemExit) as exited:
        main(["run", switch, value, "--", "python", "app.py"])
    assert exited.value.code == 2
    assert f"{switch} takes no value, got '{value}'. Write --" in capsys.readouterr().err


INVALID_BYTE = os.fsdecode(b"\xff")


@pytest.mark.parametrize(
    "words",
    [
        *(
            f"audit {question} --agent X"
            for question in ("spend", "stops", "loops", "anomalies", "unmeasured", "suggest")
        ),
        "audit policies --agent X",
        "audit spend --where session=X",
        "audit spend --where X=tenant",
        "audit spend --by X",
        "audit whois X",
        "check --agent X",
        "kill --agent X",
        "quotas block tenants X",
        "quotas block tenants acme --reason X",
        "run --quota-namespace X -- true",
    ],
)
def test_byte_that_is_no_text_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Databases, servers and reports have text only."""
    with pytest.raises(SystemExit) as ended:
        main([word.replace("X", INVALID_BYTE) for word in words.split()])
    assert ended.value.code == 2
    assert "'\\udcff' is not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize("amount", ["1e26", "1e999999999", "1e-999999999"])
def test_absurd_amount_is_refused_with_its_bound(
    amount: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would overflow, or take all memory to write out."""
    bound = "40 decimal places" if "-" in amount else "The maximum is 1,000,000,000,000."
    for words in (("spend", "--fail-above"), ("backtest", "--max-cost-usd")):
        with pytest.raises(SystemExit) as ended:
            main(["audit", *words, amount])
        assert ended.value.code == 2
        assert bound in capsys.readouterr().err
