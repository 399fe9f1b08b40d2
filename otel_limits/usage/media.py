"""Estimates the tokens of images, documents, audio and video, from the sizes in their files."""

from __future__ import annotations

import functools
import math
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from otel_limits.usage.text import tokens_of_text
from otel_limits.vendors.records import media_rules, other_media, vendors_of_classes

if TYPE_CHECKING:
    from otel_limits.vendors.records import MediaRule


# --- tokens by each vendor's rule -----------------------------------------------------------------

VIDEO: Final = 263.0
"""Tokens per second, without sound: https://ai.google.dev/gemini-api/docs/tokens."""

FLAT_SIZE: Final = (1_024, 1_024)
"""Assumed for an image that is unreadable or only linked."""
FLAT_SECONDS: Final = 60.0
"""Assumed for audio and video with an unreadable duration."""
FLAT_DOCUMENT: Final = 3_000
"""Assumed tokens of an office document, or of a linked one."""

TEXTS: Final = frozenset({"csv", "html", "md", "txt"})


class Recipient(NamedTuple):
    """The recipient of a request: vendors count the same image differently."""

    provider: str
    """The framework's module for the provider."""
    rule: MediaRule
    """The rule for its model, or an assumption if none is documented."""


@functools.lru_cache(256)
def recipient(provider: str, model: str) -> Recipient:
    """Return the recipient, by the name of the model or else by the provider."""
    name, vendor = model.lower(), vendors_of_classes().get(provider)
    rules = [each for each in media_rules() if each.models.search(name)]
    rules += [each for each in (vendor.media if vendor else ()) if each.is_default]
    return Recipient(provider, next(iter(rules), other_media()))


def tokens_of_image(data: bytes | None, to: Recipient) -> int:
    """Return the tokens of an image, by the size in its header."""
    size = (size_of(data) if data is not None else None) or FLAT_SIZE
    return to.rule.image.tokens(*size)


def tokens_of_document(data: bytes | None, kind: str, to: Recipient, *, cited: bool) -> int:
    """Return the tokens of a document: a PDF by its pages, text as text, others a flat number.

    Args:
        data: Its content, `None` if it is only linked.
        kind: Its format, such as `pdf`.
        to: The recipient.
        cited: Whether citations are requested, which makes Bedrock read pages as images.
    """
    if data is None:
        return FLAT_DOCUMENT
    if kind in TEXTS:
        return tokens_of_text(data.decode(errors="replace"))
    if kind != "pdf":
        return FLAT_DOCUMENT
    vendor = vendors_of_classes().get(to.provider)
    as_text = None if cited or vendor is None else vendor.page_as_text
    return pages_of(data) * (to.rule.page if as_text is None else as_text)


def tokens_of_audio(data: bytes | None, to: Recipient) -> int:
    """Return the tokens of audio, by the duration in its container."""
    return math.ceil(_seconds(data) * to.rule.audio)


def tokens_of_video(data: bytes | None, to: Recipient) -> int:  # noqa: ARG001  same as the others
    """Return the tokens of a video, by the duration in its container."""
    return math.ceil(_seconds(data) * VIDEO)


def _seconds(data: bytes | None) -> float:
    return (seconds_of(data) if data is not None else None) or FLAT_SECONDS


# --- size of an image -----------------------------------------------------------------------------

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


# --- pages of a PDF -------------------------------------------------------------------------------

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


# --- duration of audio and video ------------------------------------------------------------------

HEADER_BYTES: Final = 1 << 20
"""Bytes at the start and at the end that are searched for a header."""

MP3_RATES: Final = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
"""Kilobits per second of MPEG 1, layer 3."""
MP3_LOW_RATES: Final = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
"""The same for MPEG 2 and 2.5."""
MP3_HEADS: Final = {
    **dict.fromkeys((b"\xff\xfa", b"\xff\xfb"), MP3_RATES),
    **dict.fromkeys((b"\xff\xf2", b"\xff\xf3", b"\xff\xe2", b"\xff\xe3"), MP3_LOW_RATES),
}
DOUBLE: Final = 0x88
"""Length of an 8-byte Matroska number; others have 4."""
OPUS_RATE: Final = 48_000
NANOSECONDS: Final = 1_000_000_000


def seconds_of(data: bytes) -> float | None:
    """Return the duration in seconds, or `None` if it cannot be read.

    Supports WAV, FLAC, MP3 with a constant bit rate, Ogg (Opus and Vorbis), MP4, Matroska and WebM.
    """
    try:
        read = next((read for at, mark, read in CONTAINERS if data.startswith(mark, at)), None)
        found = None if read is None else read(data)
    # Unreadable media are estimated as one minute.
    except (IndexError, struct.error, ZeroDivisionError):
        return None
    return found if found is not None and 0 < found < float("inf") else None


def _wav(data: bytes) -> float | None:
    at = data.find(b"fmt ", 12, HEADER_BYTES)
    begin = data.find(b"data", 12, HEADER_BYTES)
    if at < 0 or begin < 0:
        return None
    (rate,) = struct.unpack_from("<I", data, at + 16)
    (size,) = struct.unpack_from("<I", data, begin + 4)
    # The header of a stream contains the maximum value, so use the number of bytes.
    return float(min(size, len(data) - begin - 8) / rate)


def _ogg(data: bytes) -> float | None:
    """Read the position of the last page: RFC 3533, 6."""
    # The position of the last page is the number of samples.
    last = data.rfind(b"OggS")
    (samples,) = struct.unpack_from("<Q", data, last + 6)
    if b"OpusHead" in data[:HEADER_BYTES]:
        return float(samples / OPUS_RATE)
    at = data.find(b"\x01vorbis", 0, HEADER_BYTES)
    return None if at < 0 else float(samples / struct.unpack_from("<I", data, at + 12)[0])


def _mp4(data: bytes) -> float | None:
    """Read the movie header, which is at either end: ISO 14496-12, 8.2.2."""
    at = data.find(b"mvhd", 0, HEADER_BYTES)
    if at < 0:
        at = data.rfind(b"mvhd", max(0, len(data) - HEADER_BYTES))
    if at < 0:
        return None
    # Version 1 has 8-byte times, which shifts everything after them.
    layout, offset = (">IQ", 24) if data[at + 4] == 1 else (">II", 16)
    scale, duration = struct.unpack_from(layout, data, at + offset)
    return float(duration / scale)


def _matroska(data: bytes) -> float | None:
    """Read scale and duration of the segment: RFC 9559, 5.1.2."""
    at = data.find(b"\x44\x89", 0, HEADER_BYTES)
    if at < 0:
        return None
    (duration,) = struct.unpack_from(">d" if data[at + 2] == DOUBLE else ">f", data, at + 3)
    begin = data.find(b"\x2a\xd7\xb1", 0, HEADER_BYTES)
    size = data[begin + 3] & 0x0F if begin >= 0 else 0
    # The default scale in the standard is one million nanoseconds.
    scale = int.from_bytes(data[begin + 4 : begin + 4 + size], "big") if begin >= 0 else 1_000_000
    return float(duration * scale / NANOSECONDS)


def _flac(data: bytes) -> float | None:
    """Read 20 bits of sample rate, 8 of channels and depth, 36 of samples: RFC 9639, 8.2."""
    bits = int.from_bytes(data[18:26], "big")
    return (bits & (1 << 36) - 1) / (bits >> 44)


def _mp3(data: bytes) -> float | None:
    """Read the bit rate of the first frame, after any ID3 tag."""
    at = 0
    if data[:3] == b"ID3":  # its length is written in 7 bits of each byte
        size = 0
        for byte in data[6:10]:
            size = size << 7 | byte
        at = 10 + size
    rates = MP3_HEADS.get(data[at : at + 2])
    # From the file length: frames are not counted, so only a constant bit rate is exact.
    return None if rates is None else (len(data) - at) * 8 / (rates[data[at + 2] >> 4] * 1_000)


CONTAINERS: Final[tuple[tuple[int, bytes, Callable[[bytes], float | None]], ...]] = (
    (8, b"WAVE", _wav),
    (0, b"fLaC", _flac),
    (0, b"OggS", _ogg),
    (4, b"ftyp", _mp4),
    (0, b"\x1aE\xdf\xa3", _matroska),
    (0, b"ID3", _mp3),
    *((0, head, _mp3) for head in MP3_HEADS),
)
"""Offset and signature of each container, with its reader."""
