"""Counts the pages of a PDF."""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE: Final = re.compile(rb"/Type\s*/Page(?![a-zA-Z])")
OBJECTS: Final = re.compile(rb"/Type\s*/ObjStm\b[^>]*>>\s*stream\r?\n")
"""Where objects are packed together, as PDF 1.5 and later may do: ISO 32000-1, 7.5.7."""
MAX_PACKED: Final = 1 << 20
"""Bytes of packed objects that are looked at, each time; the rest of a longer one is left out."""
MAX_STREAMS: Final = 256
BYTES_A_PAGE: Final = 50_000
"""What a page is taken to have where none can be found, such as in an encrypted file."""


def pages_of(data: bytes) -> int:
    """Return how many pages a PDF has; at least one."""
    found = len(PAGE.findall(data)) + sum(len(PAGE.findall(each)) for each in _packed(data))
    return found or max(1, len(data) // BYTES_A_PAGE)


def _packed(data: bytes) -> Iterator[bytes]:
    """Yield the objects that are packed, unpacked."""
    for number, found in enumerate(OBJECTS.finditer(data)):
        if number == MAX_STREAMS:
            return
        try:
            unpack = zlib.decompressobj()
            yield unpack.decompress(data[found.end() : found.end() + MAX_PACKED], MAX_PACKED)
        except zlib.error:  # packed in another way, or encrypted
            continue
