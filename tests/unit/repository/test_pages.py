"""README and pages: commands, links, tables, examples and size."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import otel_limits
from otel_limits.docs import page, topics
from otel_limits.settings.policy.reader import parse
from otel_limits.startup.otel_limits_startup import PACKAGES as FRAMEWORK_PACKAGES
from tests.pages import (
    Command,
    Session,
    commands,
    files,
    matches,
)
from tests.paths import ROOT
from tests.price_list import listed
from tests.readme import CONTRIBUTING, INDEX, PAGES, README, TABLES, with_tables


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


# --- links, tables, examples and size -------------------------------------------------------------

EVERY = (
    README,
    INDEX,
    *PAGES,
    ROOT / "dashboards/README.md",
    *sorted((ROOT / ".github").glob("*.md")),
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def read(path: Path) -> str:
    """Return the text of a page."""
    return path.read_text(encoding="utf-8")


def blocks(language: str, *paths: Path) -> list[str]:
    """Return the code blocks of one language."""
    return [body for path in paths for name, body in BLOCK.findall(read(path)) if name == language]


def without_blocks(path: Path) -> str:
    """Return the text of a page without code blocks, which have no links or headings."""
    return BLOCK.sub("", read(path))


def links(path: Path) -> list[tuple[Path, str]]:
    """Return the target file and anchor of each relative link of a page."""
    found = [target for target in LINK.findall(without_blocks(path)) if "://" not in target]
    pairs = [target.partition("#") for target in found]
    return [((path.parent / file).resolve() if file else path, anchor) for file, _, anchor in pairs]


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub generates for the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", without_blocks(path), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", [README, INDEX, CONTRIBUTING, *PAGES], ids=lambda path: path.stem)
def test_generated_tables_are_up_to_date(path: Path) -> None:
    """Run `python -m tests.generate tables` when this fails."""
    assert with_tables(read(path)) == read(path)


@pytest.mark.parametrize("name", TABLES)
def test_each_table_has_one_pair_of_markers(name: str) -> None:
    """Without its markers, a table would silently disappear."""
    text = "".join(map(read, (README, INDEX, CONTRIBUTING, *PAGES)))
    assert text.count(f"<!-- {name}: ") == text.count(f"<!-- /{name} -->") == 1


@pytest.mark.parametrize("path", EVERY, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_link_targets_exist(path: Path) -> None:
    """A broken link is a dead end, whether the file or the heading is missing."""
    for file, anchor in links(path):
        assert file.exists(), file
        assert not anchor or anchor in anchors(file), f"{file}#{anchor}"


def test_readme_and_index_link_every_page() -> None:
    """Readers find a page only through a link."""
    linked = {file for path in (README, INDEX) for file, _ in links(path)}
    assert linked >= {path.resolve() for path in EVERY}


def test_topics_are_all_pages() -> None:
    """`otel-limits docs` takes titles from their first lines."""
    assert sorted(topics()) == [path.stem for path in PAGES]
    for topic in topics():
        assert page(topic).startswith("# ")


@pytest.mark.parametrize("topic", ["nothing", "../../README", "", "limits.md"])
def test_unknown_topic_is_rejected(topic: str) -> None:
    """A topic is user input and must not open any other file."""
    with pytest.raises(KeyError):
        page(topic)


def test_readme_is_short() -> None:
    """It convinces; the pages explain."""
    text = read(README)
    assert len(text.split()) <= 750
    assert len(LINK.findall(text)) <= 40
    prose = [line for line in without_blocks(README).splitlines() if not line.startswith("!")]
    assert [line for line in prose if len(line) > 120] == []


def prose(path: Path) -> int:
    """Count the words of a page outside code, outputs, tables and comments."""
    text = re.sub(r"<!--.*?-->", "", without_blocks(path), flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith("|")]
    return len(" ".join(lines).split())


def test_pages_are_short() -> None:
    """A page that takes more than ten minutes to read is not read: make a table, or two pages."""
    words = {path.stem: prose(path) for path in PAGES}
    assert {page: count for page, count in words.items() if count > 1_500} == {}
    assert sum(words.values()) <= 24_000


def test_pages_open_with_an_example() -> None:
    """Readers recognize their case in an example sooner than in a description."""
    openings = {path.stem: read(path).partition("```") for path in PAGES}
    assert {page for page, (_, fence, _) in openings.items() if not fence} == set()
    words = {page: len(before.split()) for page, (before, _, _) in openings.items()}
    assert {page: count for page, count in words.items() if count > 50} == {}


def test_first_python_example_has_twelve_lines() -> None:
    """It fits on the first screen."""
    assert len([line for line in blocks("python", README)[0].splitlines() if line.strip()]) <= 12


@pytest.mark.parametrize("block", blocks("python", *EVERY))
def test_python_examples_use_existing_names(block: str) -> None:
    """Readers copy them."""
    ast.parse(block)
    for name in re.findall(r"otel_limits\.(\w+)\(", block):
        assert hasattr(otel_limits, name)


def test_programs_on_pages_are_not_named_like_a_package() -> None:
    """A file of that name would hide the framework that an agent imports."""
    names = {Path(name).stem for path in EVERY for name in files(path) if name.endswith(".py")}
    assert "my_agents" in names
    assert names & {*sys.stdlib_module_names, *FRAMEWORK_PACKAGES} == set()


@listed
@pytest.mark.parametrize("block", [b for b in blocks("yaml", *PAGES) if "apiVersion:" not in b])
def test_policy_examples_are_valid(block: str) -> None:
    """Readers copy them."""
    assert parse(block, "limits.yaml")[1] == ()
