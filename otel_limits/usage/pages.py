"""Counts the pages of a PDF."""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE: Final = re.compile(rb"/Type\s*/Page(?![a-zA-Z])")
OBJECTS: Final = re.compile(rb"/Type\s*/ObjStm\b[^>]{0,1000}>>\s*stream\r?\n")
"""Packed objects, possible since PDF 1.5: ISO 32000-1, 7.5.7. Bounded, so no file takes long."""
MAX_PACKED: Final = 1 << 20
"""Maximum bytes of packed objects that are searched, each time."""
MAX_STREAMS: Final = 256
BYTES_A_PAGE: Final = 50_000
"""Assumed if no page is found, for example in an encrypted file."""


def pages_of(data: bytes) -> int:
    """Return the number of pages of a PDF, at least one."""
    found = len(PAGE.findall(data)) + sum(len(PAGE.findall(each)) for each in _packed(data))
    return found or max(1, len(data) // BYTES_A_PAGE)


def _packed(data: bytes) -> Iterator[bytes]:
    """Yield the packed objects, decompressed."""
    for number, found in enumerate(OBJECTS.finditer(data)):
        if number == MAX_STREAMS:
            return
        try:
            unpack = zlib.decompressobj()
            yield unpack.decompress(data[found.end() : found.end() + MAX_PACKED], MAX_PACKED)
        except zlib.error:  # another compression, or encrypted
            continue
