"""Reads width and height of an image from its header."""

from __future__ import annotations

from typing import Final

PNG: Final = b"\x89PNG\r\n\x1a\n"
GIFS: Final = (b"GIF87a", b"GIF89a")
JPEG: Final = b"\xff\xd8"
MARK: Final = 0xFF
"""First byte of a JPEG marker, and the fill byte before one."""
FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG's frame markers; the others in this range are for tables."""
WITHOUT_LENGTH: Final = frozenset((0x01, *range(0xD0, 0xDA)))


def size_of(data: bytes) -> tuple[int, int] | None:
    """Return width and height in pixels, or `None` if unreadable."""
    size = None
    if data.startswith(PNG):
        size = _big(data[16:20]), _big(data[20:24])
    elif data.startswith(GIFS):
        size = _little(data[6:8]), _little(data[8:10])
    elif data.startswith(JPEG):
        size = _jpeg(data)
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        size = _webp(data)
    return size if size is not None and min(size) > 0 else None


def _jpeg(data: bytes) -> tuple[int, int] | None:
    """Skip from segment to segment, up to the frame."""
    at = 2
    while at + 9 <= len(data) and data[at] == MARK:
        marker = data[at + 1]
        if marker in FRAMES:
            return _big(data[at + 7 : at + 9]), _big(data[at + 5 : at + 7])
        if marker == MARK:
            at += 1
        else:
            at += 2 if marker in WITHOUT_LENGTH else 2 + max(2, _big(data[at + 2 : at + 4]))
    return None


def _webp(data: bytes) -> tuple[int, int] | None:
    """Read any of its three formats: https://developers.google.com/speed/webp/docs/riff_container."""
    kind = data[12:16]
    if kind == b"VP8X":
        return _little(data[24:27]) + 1, _little(data[27:30]) + 1
    if kind == b"VP8L":
        bits = _little(data[21:25])
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        return _little(data[26:28]) & 0x3FFF, _little(data[28:30]) & 0x3FFF
    return None


def _big(part: bytes) -> int:
    return int.from_bytes(part, "big")


def _little(part: bytes) -> int:
    return int.from_bytes(part, "little")
