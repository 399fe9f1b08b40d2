"""Parses YAML into values with line numbers, without creating objects from tags.

Only syntax on which all YAML parsers agree is interpreted: `true` and `false` are booleans, decimal
numbers are numbers (exact ones, if they have a fraction), everything else is text. So `no` is a
name, `010` is not an octal number and `1:30` is not a duration.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, TypeAlias

import yaml

from otel_limits.core.secrets import redact_url

Value: TypeAlias = "bool | int | Decimal | str | tuple[Node, ...] | Mapping[str, Node] | None"

DIGITS: Final = r"(0|[1-9](_?[0-9]){0,29})"
WHOLE: Final = re.compile(rf"[-+]?{DIGITS}")
FRACTION: Final = re.compile(
    rf"[-+]?({DIGITS}(\.[0-9]{{0,30}})?|\.[0-9]{{1,30}})([eE][-+]?[0-9]{{1,2}})?"
)
"""Longer numbers are text: no setting needs them, and huge ones are slow."""
LONGEST_SHOWN: Final = 80
NOTHING: Final = ("", "~", "null", "Null", "NULL")
BOOLEANS: Final = {"true": True, "True": True, "TRUE": True} | dict.fromkeys(
    ("false", "False", "FALSE"), False
)
SURROGATE: Final = re.compile("[\ud800-\udfff]")
"""Half of a character, which JSON can write but UTF-8 cannot."""
MAX_NODES: Final = 100_000
"""Maximum values of a file, counting aliases, which can double with every line."""
MAX_DEPTH: Final = 100
"""Maximum nesting of brackets, which PyYAML takes long to scan."""
TAGS: Final = frozenset(
    "tag:yaml.org,2002:" + kind
    for kind in ("bool", "float", "int", "map", "merge", "null", "seq", "str", "timestamp", "value")
)
"""The tags of plain YAML. Any other tag would create an object."""


@dataclass(frozen=True, slots=True)
class Node:
    """One value of a file."""

    value: Value
    line: int
    """The line where it starts, with its key if it has one; counted from 1."""
    shown: str
    """Its text in messages: as written, or `a mapping`."""

    def plain(self, done: dict[int, Any] | None = None) -> Any:
        """Return the value without lines.

        Values in `done` are reused: aliases can nest deeper than Python can call.
        """
        done = {} if done is None else done
        # By identity, because an alias has the same object as its anchor.
        if id(self.value) not in done:
            value: Any = self.value
            if isinstance(value, Mapping):
                value = {name: child.plain(done) for name, child in value.items()}
            elif isinstance(value, tuple):
                value = [child.plain(done) for child in value]
            done[id(self.value)] = value
        return done[id(self.value)]

    def below(self, *path: int | str) -> Node:
        """Follow keys and indexes as far as they exist."""
        node: Node = self
        for step in path:
            if isinstance(node.value, tuple) and isinstance(step, int):
                node = node.value[step]
            elif isinstance(node.value, Mapping) and step in node.value:
                node = node.value[str(step)]
            else:
                break
        return node


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake in a policy file."""

    line: int
    sentence: str


class _Loader(yaml.SafeLoader):
    """Parses YAML up to a maximum nesting of brackets."""

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        """Read an opening bracket."""
        if self.flow_level >= MAX_DEPTH:
            raise RecursionError
        super().fetch_flow_collection_start(token)


def read(text: str) -> tuple[Node, tuple[Mistake, ...]]:
    """Parse one YAML document. Invalid YAML returns an empty node and a mistake."""
    try:
        return _read(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reasons = ", ".join(filter(None, (error.context, error.problem)))
        mistake = Mistake(mark.line + 1 if mark else 1, f"Invalid YAML: {reasons}.")
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        mistake = Mistake(line, "The file has a character that is not allowed in YAML.")
    except RecursionError:
        mistake = Mistake(1, "The file is nested too deeply to be read.")
    return Node(None, mistake.line, "nothing"), (mistake,)


def _read(text: str) -> tuple[Node, tuple[Mistake, ...]]:
    # Composed, not loaded: only nodes have lines, and tags create no objects.
    root = yaml.compose(text, Loader=_Loader)
    if root is None:
        return Node(None, 1, "nothing"), (Mistake(1, "The file is empty."),)
    if _size(root, {}) > MAX_NODES:
        sentence = f"The file has more than {MAX_NODES:,} values, counting aliases."
        return Node(None, 1, "nothing"), (Mistake(1, sentence),)
    converter = _Converter()
    return converter.node(root), tuple(converter.mistakes)


def _size(node: yaml.Node, sizes: dict[yaml.Node, int]) -> int:
    """Count the values below a node. Aliases count each time but are visited once."""
    if node not in sizes:
        sizes[node] = 1  # an alias may refer to its own parent
        size = 1
        for part in node.value if isinstance(node, yaml.CollectionNode) else ():
            # An item of a list, or key and value of a mapping.
            below = part if isinstance(part, tuple) else (part,)
            size += sum(_size(each, sizes) for each in below)
        sizes[node] = size
    return sizes[node]


class _Converter:
    """Converts PyYAML nodes to ours, each once even if aliases repeat it."""

    def __init__(self) -> None:
        """Start without mistakes."""
        self.mistakes: list[Mistake] = []
        self._done: dict[yaml.Node, Node | None] = {}

    def node(self, node: yaml.Node) -> Node:
        """Convert a node and everything below it."""
        line = node.start_mark.line + 1
        # An alias is the same node. Converting each once keeps nested aliases ("billion laughs")
        # small.
        if node not in self._done:
            self._done[node] = None  # in progress
            self._done[node] = self._convert(node, line)
        done = self._done[node]
        if done is None:
            self.mistakes.append(Mistake(line, "An alias refers to its own parent."))
            return Node(None, line, "nothing")
        return done

    def _convert(self, node: yaml.Node, line: int) -> Node:
        if node.tag not in TAGS:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self.mistakes.append(Mistake(line, f"The tag {tag} is not allowed: plain YAML only."))
            return Node(None, line, "nothing")
        if isinstance(node, yaml.MappingNode):
            return Node(self._mapping(node), line, "a mapping")
        if isinstance(node, yaml.SequenceNode):
            items = tuple(self.node(item) for item in node.value)
            return Node(items, line, _shown(items))
        assert isinstance(node, yaml.ScalarNode)
        return _scalar(node.value, line, is_quoted=node.style is not None)

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self.mistakes.append(Mistake(line, "A key must be a single word or text."))
            elif SURROGATE.search(key.value):
                sentence = f"The key {key.value!r} contains half a character."
                self.mistakes.append(Mistake(line, sentence))
            # YAML 1.2 requires unique keys (3.2.1.3), but PyYAML silently uses the last one.
            elif key.value in entries:
                first = entries[key.value].line
                self.mistakes.append(
                    Mistake(
                        line,
                        f"Duplicate key {redact_url(key.value)!r}, first on line {first}.",
                    )
                )
            else:
                # The line of the key, not of the block after it.
                entries[key.value] = dataclasses.replace(self.node(value), line=line)
        return entries


def _shown(items: tuple[Node, ...]) -> str:
    # Nested lists are abbreviated, because aliases could make them arbitrarily long.
    shown = ["a list" if isinstance(item.value, tuple) else item.shown for item in items]
    text = f"[{', '.join(shown)}]"
    return text if len(text) <= LONGEST_SHOWN else "a list"


def _scalar(text: str, line: int, *, is_quoted: bool) -> Node:
    # Quoted words are always text: `"true"` and `"5"`.
    value = text if is_quoted else _unquoted(text)
    if value is None:
        return Node(None, line, "nothing")
    return Node(value, line, repr(value) if isinstance(value, str) else text)


def _unquoted(text: str) -> bool | int | Decimal | str | None:
    if text in NOTHING:
        return None
    if text in BOOLEANS:
        return BOOLEANS[text]
    if WHOLE.fullmatch(text):
        return int(text)
    if FRACTION.fullmatch(text):
        return Decimal(text)
    return text
