"""Which Python a command starts, as far as `otel-limits run` can see it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from otel_limits.cli.run_command import interpreter_of, is_other_program, notices, pex_problem
from otel_limits.settings.policy.document import NO_DOCUMENT
from otel_limits.settings.policy.reader import parse
from otel_limits.settings.settings_reader import read_settings
from otel_limits.settings.table import Settings

ENVIRON = {"PATH": os.environ["PATH"]}


@pytest.fixture
def script(tmp_path: Path) -> str:
    """Return the path of an executable whose first line a test writes."""
    path = tmp_path / "app"
    path.touch()
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("command", "words", "program"),
    [
        ("python", "python", None),
        ("python app.py", "python", "app.py"),
        ("python -I app.py", "python -I", "app.py"),
        ("/usr/bin/python3.12 -uE app.py -S", "/usr/bin/python3.12 -uE", "app.py"),
        ("python -S -m app", "python -S", None),
        ("python -X dev -W once::UserWarning a.py", "python -X dev -W once::UserWarning", "a.py"),
        ("python -Xdev -WError -I app.py", "python -Xdev -WError -I", "app.py"),
        ("python -Im app", "python -I", None),
        ("python -c print() -I", "python", None),
        ("python -um app -S", "python -u", None),
        ("python - -I", "python", "-"),
        ("pypy --check-hash-based-pycs always a.py", "pypy --check-hash-based-pycs always", "a.py"),
        ("pypy3 -E app.py", "pypy3 -E", "app.py"),
    ],
)
def test_options_of_python_are_separated_from_the_program(
    command: str, words: str, program: str | None
) -> None:
    """They alone decide whether it loads otel-limits; arguments of the program may look alike."""
    interpreter = interpreter_of(command.split(), ENVIRON["PATH"])
    assert interpreter is not None
    assert (" ".join(interpreter.words), interpreter.script) == (words, program)


@pytest.mark.parametrize(
    "first_line",
    [
        f"{sys.executable}",
        f"{sys.executable} -I",
        "/usr/bin/env python3",
        "/usr/bin/env -S python3 -sE",
        "/usr/bin/env -S -i A=1 python3",
    ],
)
def test_first_line_names_the_python_of_a_script(script: str, first_line: str) -> None:
    """With its options, as the system starts it."""
    Path(script).write_text(f"#!{first_line}\n")
    assert interpreter_of([script, "-S"], None) == (first_line.split(), script)
    assert not is_other_program([script], ENVIRON)


@pytest.mark.parametrize(
    "first_line", ["#!/bin/sh", "#!/usr/bin/env -S uv run python", "\x7fELF", ""]
)
def test_other_programs_are_not_asked(script: str, first_line: str) -> None:
    """With the words of a question, they could do anything."""
    Path(script).write_text(f"{first_line}\npython app.py\n")
    assert interpreter_of([script], None) is None
    assert is_other_program([script], ENVIRON)


@pytest.mark.parametrize("command", ["nice python app.py", "env -i python app.py", "sh -c python"])
def test_commands_that_start_others_are_not_known(command: str) -> None:
    """Any list of them would be incomplete, and so would their options."""
    assert is_other_program(command.split(), ENVIRON)


def test_missing_command_is_not_another_program(script: str) -> None:
    """The system reports it."""
    Path(script).chmod(0o644)
    assert not is_other_program(["no-such-program"], ENVIRON)
    assert not is_other_program([script], ENVIRON)


def test_self_naming_script_is_not_asked(script: str) -> None:
    """The system reports the error itself."""
    Path(script).write_text(f"#!{script}\n")
    assert interpreter_of([script], None) is None


def test_an_unpacked_pex_is_one_too(tmp_path: Path) -> None:
    """It is a directory with PEX-INFO in it."""
    assert pex_problem(tmp_path) is None
    (tmp_path / "PEX-INFO").write_text("{}")
    assert "is a PEX" in (pex_problem(tmp_path) or "")


@pytest.mark.parametrize(
    ("command", "variables", "named"),
    [
        ("python app.py --max-turns 3", {}, "--max-turns N -- python"),
        ("python app.py -v --tree-max-cost-usd=2", {}, "--tree-max-cost-usd USD -- python"),
        ("python app.py --policy limits.yaml", {}, "--policy PATH -- python"),
        ("python app.py --ledger a.db", {}, None),
        ("python app.py --max-turns 3", {"OTEL_LIMITS_CONVERSATION_MAX_TURNS": "9"}, None),
        ("python -m otel-limits run --max-turns 3", {}, None),
    ],
)
def test_limit_after_the_program_is_named(
    command: str, variables: dict[str, str], named: str | None
) -> None:
    """It is an argument of the program, which may know it; so it is no mistake."""
    settings = read_settings(variables).settings
    found = notices(command.split(), ENVIRON, settings, NO_DOCUMENT)
    assert [each.partition("otel-limits run ")[2] for each in found] == (
        [] if named is None else [f"{named} ..."]
    )


@pytest.mark.parametrize(
    "policy",
    [
        "defaults: {limits: {max_turns: 3}}",
        "agents: {b: {limits: {max_turns: 3}}}",
        "quotas: {q: {tokens: 9, window: day}}",
    ],
)
def test_limit_after_the_program_is_not_named_next_to_a_policy_file(policy: str) -> None:
    """Its limits apply, so the option was meant for the program."""
    document, mistakes = parse(policy, "limits.yaml")
    assert mistakes == ()
    command = ["python", "app.py", "--max-turns", "3"]
    assert notices(command, ENVIRON, Settings(), document) == []
