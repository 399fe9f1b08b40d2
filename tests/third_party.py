"""The binding in `tests.second_framework` as a distribution of its authors, and its framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PROJECT: Final = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "bots-limits"
version = "2.0"
dependencies = ["bots", "otel-limits"]

[project.entry-points."otel_limits.frameworks"]
bots = "bots_limits:BOTS"
"""
"""The project of the distribution."""

TEST: Final = """\
import asyncio

import otel_limits
from bots import Bot, Model, Reply


class Endless(Model):
    calls = 0

    async def ask(self, messages, tools):
        self.calls += 1
        return Reply(tools=[(str(self.calls), "look", None)], tokens=(10, 5))


async def look(argument):
    return "nothing"


def test_bot_is_halted():
    otel_limits.enable(max_turns=3)
    bot = Bot("bob", Endless(), {"look": look})
    ending = asyncio.run(bot.run("go"))
    otel_limits.disable()
    assert (ending.reason, bot.model.calls) == ("max_turns", 3)
    assert otel_limits.stop_of(ending).usage.total == 45
"""
"""A test of the binding."""

ENTRY_POINTS: Final = "[otel_limits.frameworks]\nbots = bots_limits:BOTS\n"


def framework() -> str:
    """Return the module `bots`."""
    return (ROOT / "tests/bots.py").read_text(encoding="utf-8")


def binding() -> str:
    """Return the module `bots_limits`."""
    source = (ROOT / "tests/second_framework.py").read_text(encoding="utf-8")
    return source.replace("tests.bots", "bots")


def write_project(place: Path) -> Path:
    """Write the project of the binding into a new directory."""
    place.mkdir()
    (place / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    (place / "bots_limits.py").write_text(binding(), encoding="utf-8")
    return place


def write_metadata(place: Path, name: str, version: str = "1.0", entry_points: str = "") -> Path:
    """Write the metadata of an installed distribution."""
    metadata = place / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (metadata / "METADATA").write_text(text, encoding="utf-8")
    if entry_points:
        (metadata / "entry_points.txt").write_text(entry_points, encoding="utf-8")
    return metadata


def install_framework(place: Path) -> None:
    """Install the framework alone."""
    (place / "bots.py").write_text(framework(), encoding="utf-8")
    (write_metadata(place, "bots", "1.5") / "top_level.txt").write_text("bots\n")


def install(place: Path, entry_points: str = ENTRY_POINTS) -> None:
    """Install the framework and its binding, as pip would, only faster."""
    install_framework(place)
    (place / "bots_limits.py").write_text(binding(), encoding="utf-8")
    write_metadata(place, "bots-limits", "2.0", entry_points)
