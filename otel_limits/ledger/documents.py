"""JSON documents in a file: one per line, printed over lines, in an array, or within log lines.

A row of a CSV file is a document, too: an object with the names of the columns.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

GZIP_MAGIC: Final = b"\x1f\x8b"
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
"""Windows may add it."""
UTF_16: Final = b"\xff\xfe"
"""Begins a file that PowerShell has written."""
TOKEN: Final = re.compile(rb'"(?:[^"\\]+|\\.)*"?|[{}]')
"""Braces, and strings, which may contain others. A string never spans lines."""
HEADER: Final = re.compile(rb'(?:\xef\xbb\xbf)?"?\w+"?(?:,"?\w+"?)+\r?\n?')
"""The first line of a CSV file: names without anything else, unlike JSON and logs."""
MAX_FIELD: Final = 2**31 - 1
"""Characters of a field of a CSV file, which may be a whole prompt."""
AROUND: Final = BYTE_ORDER_MARK + b"[], \t\r\n"
"""Characters that may separate objects."""


@dataclass(frozen=True, slots=True)
class JsonDocument:
    """A JSON object of a file, or a line without one."""

    line: int
    """The number of the line on which it begins."""
    text: str
    value: Any
    problem: str | None = None
    """Why it is no JSON object."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Iterable[bytes]]:
    """Open a file, which may be compressed whatever its name, or in UTF-16.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        begin = file.peek(2)[:2]  # without reading, since a pipe has no way back
        if begin == GZIP_MAGIC:
            with gzip.open(file, "rb") as unpacked:
                yield unpacked
        elif begin == UTF_16:
            text = io.TextIOWrapper(file, "utf-16", errors="replace")
            yield (line.encode() for line in text)
        else:
            yield file


def documents_in(lines: Iterable[bytes]) -> Iterator[JsonDocument]:
    """Find the JSON objects in lines.

    An array of objects is the objects, and the prefix of a logger is ignored. An
    object that is cut off ends where a line has a whole one. The rows of a CSV file are objects.
    """
    every = iter(lines)
    first = list(itertools.islice(every, 1))
    if first and HEADER.fullmatch(first[0]):
        yield from _rows_in(itertools.chain(first, every))
    else:
        yield from _objects_in(itertools.chain(first, every))


def _rows_in(lines: Iterable[bytes]) -> Iterator[JsonDocument]:
    """Read the rows of a CSV file, whose fields may have several lines."""
    csv.field_size_limit(MAX_FIELD)
    text = (line.decode("utf-8-sig", "replace") for line in lines)
    rows = csv.DictReader(text, restkey="(more)", strict=True)
    try:
        for row in rows:
            if None in row.values() or "(more)" in row:
                problem = f"It does not have {len(rows.fieldnames or ())} fields."
                yield JsonDocument(rows.line_num, "", None, problem)
            else:
                yield JsonDocument(rows.line_num, "", row)
    except csv.Error as error:
        yield JsonDocument(rows.line_num, "", None, str(error))


def _objects_in(lines: Iterable[bytes]) -> Iterator[JsonDocument]:
    held = Held()
    for number, line in enumerate(lines, start=1):
        whole = _whole(number, line)
        if whole is None:
            yield from held.added(number, line)
            continue
        if held.depth:
            yield held.rest()
        yield whole
    if held.depth:
        yield held.rest()


def _whole(number: int, line: bytes) -> JsonDocument | None:
    """Return a line that is an object by itself; in one that is printed over lines, none is."""
    if not line.startswith((b"{", BYTE_ORDER_MARK)):
        return None
    try:
        text = line.decode("utf-8-sig")
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    # An empty object may be a part of a document that is printed without indentation.
    return JsonDocument(number, text, value) if value and isinstance(value, dict) else None


class Held:
    """The part of an object that has been read."""

    def __init__(self) -> None:
        """Begin between two objects."""
        self.depth = 0
        """Objects that are open."""
        self._line = 0
        self._parts: list[bytes] = []

    def rest(self) -> JsonDocument:
        """Give up what has been read: a whole object, or one without an end."""
        held = b"".join(self._parts)
        self.depth, self._parts = 0, []
        try:
            text = held.decode()
            return JsonDocument(self._line, text, json.loads(text))
        except (ValueError, RecursionError) as error:
            return JsonDocument(self._line, "", None, str(error))

    def added(self, number: int, line: bytes) -> Iterator[JsonDocument]:
        """Add a line, and yield the objects that end on it."""
        at, has_object = 0, self.depth > 0
        while self.depth or (at := line.find(b"{", at)) >= 0:
            if not self.depth:
                has_object, self._line = True, number
            end = self._end(line, at)
            self._parts.append(line[at:end])
            if self.depth:
                return
            yield self.rest()
            at = end
        if not has_object and line.strip(AROUND):
            yield JsonDocument(number, "", None, "There is no JSON object on it.")

    def _end(self, line: bytes, at: int) -> int:
        """Return where the open object ends on a line, or the end of the line."""
        for token in TOKEN.finditer(line, at):
            if token[0] == b"{":
                self.depth += 1
            elif token[0] == b"}":
                self.depth -= 1
                if not self.depth:
                    return token.end()
        return len(line)
