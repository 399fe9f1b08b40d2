"""Every command of README and pages works, and prints the output shown below it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import (
    Command,
    Session,
    commands,
    matches,
)


def test_changed_output_does_not_match() -> None:
    """Omitted parts and values that differ between machines are ignored."""
    assert matches("a\n[...]\nc 127.0.0.1:9464\n", "a\nb\nc 127.0.0.1:80\n")
    assert not matches("a\n[...]\nd\n", "a\nb\nc\n")
    assert not matches("a\n", "a\nb\n")


@pytest.mark.parametrize("text", ["otel-limits audit spent", "otel-limit check", "ls"])
def test_broken_command_raises(text: str, tmp_path: Path) -> None:
    """Even if its output is not shown."""
    with pytest.raises(AssertionError):
        Session(tmp_path).run(Command(text, None))


def test_block_without_prompt_has_one_command_per_line() -> None:
    """Such a block shows no output."""
    assert [each.shown for each in commands("a\nb  # why\n", 0)] == [None, None]
    assert [each.shown for each in commands("$ a\nx\ny\n$ b\n", 0)] == ["x\ny\n", ""]
