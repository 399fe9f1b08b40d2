"""What the README says is so."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import otel_limits
from otel_limits.settings.policy.reader import parse
from tests.readme import README, TABLES, written

TEXT = README.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    """Code blocks of one language."""
    return [body for name, body in BLOCKS if name == language]


def test_the_tables_are_those_of_the_code() -> None:
    """Run `python -m tests.readme` when this fails."""
    assert written(TEXT) == TEXT


@pytest.mark.parametrize("name", TABLES)
def test_every_table_has_its_place(name: str) -> None:
    """A marker that is missing would leave a table out silently."""
    assert f"<!-- {name}: " in TEXT
    assert f"<!-- /{name} -->" in TEXT


def test_the_first_example_prints_what_it_says(tmp_path: Path) -> None:
    """The example is run as a reader would, and its output is the one that is shown."""
    (tmp_path / "app.py").write_text(blocks("python")[0], encoding="utf-8")
    shown = blocks("console")[0].splitlines()
    variable, _, command = shown[0].removeprefix("$ ").partition(" ")
    name, _, value = variable.partition("=")
    programs = str(Path(sys.executable).parent)
    done = subprocess.run(
        command.split(),
        cwd=tmp_path,
        env={**os.environ, name: value, "PATH": programs + os.pathsep + os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.stderr + done.stdout).splitlines() == shown[1:]


def test_the_first_example_has_twelve_lines() -> None:
    """It fits on the first screen."""
    assert len([line for line in blocks("python")[0].splitlines() if line.strip()]) <= 12


@pytest.mark.parametrize("block", blocks("python"))
def test_the_examples_are_python(block: str) -> None:
    """They parse, and every name that they take from otel_limits exists."""
    ast.parse(block)
    for name in re.findall(r"otel_limits\.(\w+)\(", block):
        assert hasattr(otel_limits, name)


def test_the_policy_file_is_valid() -> None:
    """The example can be copied."""
    (example,) = [block for block in blocks("yaml") if "agents:" in block]
    assert parse(example, "limits.yaml")[1] == ()
