"""What the README and the pages say is so, and every page can be found."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import otel_limits
from otel_limits.docs import page, topics
from otel_limits.settings.policy.reader import parse
from tests.readme import PAGES, README, ROOT, TABLES, written

EVERY = (
    README,
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
    """Code blocks of one language."""
    return [body for path in paths for name, body in BLOCK.findall(read(path)) if name == language]


def without_blocks(path: Path) -> str:
    """Return the text of a page without its code, in which nothing is a link or a title."""
    return BLOCK.sub("", read(path))


def links(path: Path) -> list[tuple[Path, str]]:
    """Return every link of a page to a file of ours: the file, and the anchor or nothing."""
    found = [target for target in LINK.findall(without_blocks(path)) if "://" not in target]
    pairs = [target.partition("#") for target in found]
    return [((path.parent / file).resolve() if file else path, anchor) for file, _, anchor in pairs]


def anchors(path: Path) -> set[str]:
    """Return what GitHub makes of the titles of a page."""
    titles = re.findall(r"^#+ (.+)$", without_blocks(path), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", [README, *PAGES], ids=lambda path: path.stem)
def test_the_tables_are_those_of_the_code(path: Path) -> None:
    """Run `python -m tests.readme` when this fails."""
    assert written(read(path)) == read(path)


@pytest.mark.parametrize("name", TABLES)
def test_every_table_has_one_place(name: str) -> None:
    """A missing marker would leave a table out silently."""
    text = "".join(map(read, (README, *PAGES)))
    assert text.count(f"<!-- {name}: ") == text.count(f"<!-- /{name} -->") == 1


@pytest.mark.parametrize("path", EVERY, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_link_leads_somewhere(path: Path) -> None:
    """Its file exists, and so does the title that it names."""
    for file, anchor in links(path):
        assert file.exists(), file
        assert not anchor or anchor in anchors(file), f"{file}#{anchor}"


def test_every_page_is_linked_from_the_readme() -> None:
    """A page that nobody finds is not read."""
    linked = {file for file, _ in links(README)}
    assert linked >= {path.resolve() for path in EVERY[1:]}


def test_every_topic_is_a_page() -> None:
    """Every page is listed and starts with its title."""
    assert sorted(topics()) == [path.stem for path in PAGES]
    for topic in topics():
        assert page(topic).startswith("# ")


@pytest.mark.parametrize("topic", ["nothing", "../../README", "", "limits.md"])
def test_an_unknown_topic_is_refused(topic: str) -> None:
    """Nothing but a page is ever opened."""
    with pytest.raises(KeyError):
        page(topic)


def test_the_wheel_contains_every_page(tmp_path: Path) -> None:
    """`otel-limits docs` works without a checkout."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=100,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert names >= {f"otel_limits/docs/{path.name}" for path in PAGES}


def test_the_readme_leads_and_the_pages_explain() -> None:
    """It has at most 250 lines."""
    assert len(read(README).splitlines()) <= 250


def test_the_first_example_has_twelve_lines() -> None:
    """It fits on the first screen."""
    assert len([line for line in blocks("python", README)[0].splitlines() if line.strip()]) <= 12


@pytest.mark.parametrize("block", blocks("python", *EVERY))
def test_the_examples_are_python(block: str) -> None:
    """They parse, and every name that they take from otel_limits exists."""
    ast.parse(block)
    for name in re.findall(r"otel_limits\.(\w+)\(", block):
        assert hasattr(otel_limits, name)


@pytest.mark.parametrize("block", [b for b in blocks("yaml", *PAGES) if "apiVersion:" not in b])
def test_the_policy_files_are_valid(block: str) -> None:
    """They can be copied."""
    assert parse(block, "limits.yaml")[1] == ()
