"""The language of the project: plain English, terms of the field, and one word per concept.

`language.tsv` lists expressions that a native speaker would not write, and names without a verb or
an object. Lower a ceiling whenever its count falls; never raise one.
"""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest

from tests.paths import ROOT
from tests.readme import PAGES, README

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CEILINGS: Final = {"pages": 1, "dashboards": 0, "package": 0, "tests": 37}
"""How many matches the prose of each room may have."""
NAME_CEILINGS: Final = {
    "verbs of speech": 5,
    "tests without a subject": 0,
    "tests of speech": 0,
    "vague verbs": 0,
}
"""How many functions and classes may have such a name."""
TITLE_CEILING: Final = 0
"""How many titles of dashboards may be sentences."""

LINES: Final = (ROOT / "tests/language.tsv").read_text(encoding="utf-8").splitlines()
EXPRESSIONS: Final = tuple(tuple(line.split("\t")) for line in LINES)
"""Kind, name and expression."""
FENCE: Final = re.compile(r"```.*?```", re.DOTALL)
PARTS: Final = re.compile(
    r"""
    (?P<comment>\#.*)
    | (?:\b[rbfuRBFU]{1,2})?(?:
        \"""(?:[^\\]|\\.|\\\n)*?\"""
        | \'\'\'(?:[^\\]|\\.|\\\n)*?\'\'\'
        | "(?:[^"\\\n]|\\.|\\\n)*"
        | '(?:[^'\\\n]|\\.|\\\n)*'
    )
    | \b(?:def|class)\s+(?P<name>\w+)
    """,
    re.VERBOSE,
)
"""A comment, a string, or a name of a function or class. `tokenize` takes five times as long."""
PAGES_OUTSIDE: Final = (
    README,
    ROOT / ".github/CONTRIBUTING.md",
    ROOT / ".github/SECURITY.md",
    ROOT / "dashboards/README.md",
)


def expressions(kind: str) -> dict[str, re.Pattern[str]]:
    """Return the expressions of one kind by name."""
    flags = re.IGNORECASE | re.MULTILINE if kind == "prose" else 0
    return {
        name: re.compile(expression, flags)
        for each, name, expression in EXPRESSIONS
        if each == kind
    }


def modules(folder: str) -> list[Path]:
    """Return the Python files of a top-level folder."""
    paths = (ROOT / folder).rglob("*.py")
    return [path for path in paths if not {"node_modules", "__pycache__"} & set(path.parts)]


class Module(NamedTuple):
    """The comments, strings and names of a module."""

    prose: str
    """Its comments and strings."""
    names: list[str]
    """Its functions and classes."""


@cache
def read_module(path: Path) -> Module:
    """Read a module."""
    prose, names = [], []
    for part in PARTS.finditer(path.read_text("utf-8")):
        if part["name"]:
            names.append(part["name"])
        elif not (part["comment"] and re.search("noqa|type:", part["comment"])):
            prose.append(part[0])
    return Module("\n".join(prose), names)


def prose(room: str) -> Iterator[str]:
    """Yield the prose of each file of a room."""
    if room == "pages":
        for path in (*PAGES_OUTSIDE, *PAGES):
            yield FENCE.sub("", path.read_text(encoding="utf-8"))
        return
    for path in modules("otel_limits" if room == "package" else room):
        yield read_module(path).prose
    if room == "dashboards":
        for path in (ROOT / "dashboards/templates").iterdir():
            yield path.read_text(encoding="utf-8")


@pytest.mark.parametrize("room", CEILINGS)
def test_prose_stays_plain(room: str) -> None:
    """Sentences that read like a translation cost every reader time."""
    text = "\n".join(prose(room))
    found = {name: len(each.findall(text)) for name, each in expressions("prose").items()}
    total = sum(found.values())
    assert total <= CEILINGS[room], {name: count for name, count in found.items() if count}


def names() -> Iterator[str]:
    """Yield the names of all functions and classes."""
    for path in chain.from_iterable(map(modules, ("otel_limits", "dashboards", "tests"))):
        for name in read_module(path).names:
            if (path.name, name) != ("script.py", "says"):
                yield name


@pytest.mark.parametrize("rule", NAME_CEILINGS)
def test_names_have_a_verb_and_an_object(rule: str) -> None:
    """A name without them makes its reader open the function."""
    expression = expressions("name")[rule]
    found = [name for name in names() if expression.search(name)]
    assert len(found) <= NAME_CEILINGS[rule], found


def titles(node: Any) -> Iterator[str]:
    """Yield every title in a dashboard."""
    if isinstance(node, dict):
        if isinstance(title := node.get("title"), str):
            yield title
        node = list(node.values())
    if isinstance(node, list):
        yield from chain.from_iterable(map(titles, node))


def test_dashboard_titles_are_noun_phrases() -> None:
    """A panel is found by its subject, so the subject comes first."""
    (expression,) = expressions("title").values()
    boards = (ROOT / "dashboards/grafana/dashboards").glob("*.json")
    every = (title for path in boards for title in titles(json.loads(path.read_text("utf-8"))))
    found = [title for title in every if expression.search(title)]
    assert len(found) <= TITLE_CEILING, found
