"""A misspelt option is refused by its command, which asks what was meant."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

import pytest

from otel_limits.cli import main
from otel_limits.cli.parser import make_parser


def commands_below(parser: ArgumentParser, *above: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that there is, with its parser."""
    yield above, parser
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for name, below in action.choices.items():
                yield from commands_below(below, *above, name)


OPTIONS = [
    (words, option)
    for words, parser in commands_below(make_parser())
    for action in parser._actions
    for option in action.option_strings
    if option.startswith("--")
]


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


@pytest.mark.parametrize(("words", "option"), OPTIONS, ids=str)
def test_every_option_of_every_command_is_asked_about(
    words: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a letter twice in its name; also where what is required is not given."""
    misspelt = option[:3] + option[2:]
    assert refusal(capsys, *words, misspelt).endswith(f"Did you mean {option}?")


def test_what_is_near_nothing_is_refused_without_a_question(
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
    assert main(["run", "--max-turns", "abc", "--", "python", "--max-turn", value]) == 2
    assert "Did you mean" not in capsys.readouterr().err


def test_a_missing_value_is_no_misspelling(capsys: pytest.CaptureFixture[str]) -> None:
    """The option is known."""
    said = refusal(capsys, "run", "--max-turns")
    assert said == "otel-limits run: error: argument --max-turns: expected one argument"
