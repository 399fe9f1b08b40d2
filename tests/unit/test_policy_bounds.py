"""A policy file is read in bounded time, whatever it is: an agent may be waiting for it."""

from __future__ import annotations

import inspect
import os
import sys
import time
from typing import TYPE_CHECKING

import pytest
import yaml

from otel_limits.settings.policy.file import LOOK_INTERVAL_SECONDS, MAX_BYTES, PolicyFile
from otel_limits.settings.policy.reader import MAX_NODES, parse

if TYPE_CHECKING:
    from pathlib import Path


def bomb(section: str, depth: int, width: int) -> str:
    """Write a mapping that repeats the one before it `width` times, `depth` times over."""
    lines = [f"{section}:", "  a0: &a0 {tokens: 5, window: day}"]
    for number in range(1, depth):
        repeated = ", ".join(f"k{each}: *a{number - 1}" for each in range(width))
        lines.append(f"  a{number}: &a{number} {{{repeated}}}")
    return "\n".join(lines)


@pytest.mark.parametrize("section", ["quotas", "defaults", "agents", "models", "tools", "else"])
@pytest.mark.parametrize(("depth", "width"), [(8, 9), (20, 2), (40, 9), (300, 2)])
def test_aliases_cost_what_they_are_written_with(
    tmp_path: Path, section: str, depth: int, width: int
) -> None:
    """Not what they would be written out."""
    path = tmp_path / "policy.yaml"
    path.write_text(bomb(section, depth, width), encoding="utf-8")
    begin = time.process_time()
    mistakes = PolicyFile(str(path)).mistakes
    assert time.process_time() - begin < 2
    assert mistakes == (
        f"{path}:1: The file has more than {MAX_NODES:,} values, counting aliases.",
    )


@pytest.mark.parametrize("section", ["quotas", "agents"])
def test_a_few_aliases_are_fine(tmp_path: Path, section: str) -> None:
    """They are there to be used."""
    said = {"quotas": "{tokens: 5, window: day}", "agents": "{limits: {max_turns: 3}}"}[section]
    names = "".join(f"  n{number}: *first\n" for number in range(200))
    path = tmp_path / "policy.yaml"
    path.write_text(f"{section}:\n  n: &first {said}\n{names}", encoding="utf-8")
    file = PolicyFile(str(path))
    assert file.mistakes == ()
    assert len(getattr(file.document, section)) == 201


def test_nested_aliases_need_no_deep_stack() -> None:
    """The agent that reads the file may be deep in recursion itself."""
    levels = ["l0: &l0 [x]", *(f"l{n}: &l{n} [*l{n - 1}]" for n in range(1, 400))]
    text = "\n".join([*levels, "quotas: {q: {window: day, tokens: *l399}}"])
    expected = parse(text, "limits.yaml")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 150)
    try:
        assert parse(text, "limits.yaml") == expected
    finally:
        sys.setrecursionlimit(limit)
    assert expected[1][-1].startswith('limits.yaml:401: quotas["q"]: tokens must be a whole number')


def test_recursive_mapping_is_rejected(tmp_path: Path) -> None:
    """It has no end."""
    path = tmp_path / "policy.yaml"
    path.write_text("agents: &a\n  x: *a\n", encoding="utf-8")
    assert any("its own parent" in mistake for mistake in PolicyFile(str(path)).mistakes)


def test_a_file_is_not_longer_than_a_megabyte(tmp_path: Path) -> None:
    """One byte more is a sentence, and nothing of it is parsed."""
    path = tmp_path / "policy.yaml"
    path.write_bytes(b"#" * MAX_BYTES)
    assert PolicyFile(str(path)).mistakes == (f"{path}:1: The file is empty.",)
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    assert PolicyFile(str(path)).mistakes == (
        f"{path} cannot be read: it is longer than 1,000,000 bytes.",
    )


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are none")
@pytest.mark.usefixtures("faulty")
def test_a_fifo_is_a_sentence(tmp_path: Path) -> None:
    """Reading a pipe must not block, at the start or after it replaced a file."""
    path = tmp_path / "policy.yaml"
    path.write_text(yaml.safe_dump({"defaults": {"limits": {"max_turns": 3}}}), encoding="utf-8")
    now = [0.0]
    file = PolicyFile(str(path), clock=lambda: now[0])
    assert file.mistakes == ()
    path.unlink()
    os.mkfifo(path)
    refused = (f"{path} cannot be read: it is not a regular file.",)
    assert PolicyFile(str(path)).mistakes == refused
    now[0] += LOOK_INTERVAL_SECONDS
    file.refresh()
    newest: tuple[str, ...] = file.mistakes
    assert newest == refused
    assert file.document.defaults["max_turns"].value == 3


@pytest.mark.parametrize("name", ["", "/dev/zero", "/dev/null"])
def test_non_file_path_is_rejected_with_a_message(tmp_path: Path, name: str) -> None:
    """A directory, and devices, one of which never ends."""
    assert len(PolicyFile(name or str(tmp_path)).mistakes) == 1
