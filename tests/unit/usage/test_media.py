"""Images, documents, audio and video: what their headers say, and what vendors make of it."""

from __future__ import annotations

import io
import struct
import wave
import zlib
from typing import Any

import pytest

from otel_limits.bindings.strands.requests import projected_input
from otel_limits.testing import ScriptedModel
from otel_limits.usage.media import (
    pages_of,
    recipient,
    seconds_of,
    size_of,
    tokens_of_audio,
    tokens_of_document,
    tokens_of_image,
    tokens_of_video,
)

WIDTH, HEIGHT = 1_000, 800


def png(width: int = WIDTH, height: int = HEIGHT, size: int = 0) -> bytes:
    """Make the beginning of a PNG, filled up to `size` bytes."""
    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height)
    return head + bytes(max(0, size - len(head)))


def jpeg() -> bytes:
    """Make the beginning of a JPEG: a thumbnail's segment, then the frame."""
    thumbnail = b"\xff\xe1" + struct.pack(">H", 12) + b"\xff\xc0" + bytes(8)
    frame = b"\xff\xc0" + struct.pack(">HBHHB", 17, 8, HEIGHT, WIDTH, 3)
    return b"\xff\xd8" + thumbnail + frame + bytes(9)


WEBPS = {
    "VP8X": b"VP8X" + struct.pack("<II", 10, 0) + struct.pack("<I", WIDTH - 1)[:3]
    + struct.pack("<I", HEIGHT - 1)[:3],
    "VP8L": b"VP8L" + struct.pack("<IBI", 5, 0x2F, WIDTH - 1 | HEIGHT - 1 << 14),
    "VP8 ": b"VP8 " + struct.pack("<I", 10) + bytes(3) + b"\x9d\x01\x2a"
    + struct.pack("<HH", WIDTH, HEIGHT),
}  # fmt: skip
IMAGES = {
    "PNG": png(),
    "JPEG": jpeg(),
    "GIF": b"GIF89a" + struct.pack("<HH", WIDTH, HEIGHT),
    **{name: b"RIFF" + bytes(4) + b"WEBP" + rest for name, rest in WEBPS.items()},
}


@pytest.mark.parametrize("name", IMAGES)
def test_the_size_of_an_image(name: str) -> None:
    """It is read from the header of every format that Strands knows."""
    assert size_of(IMAGES[name]) == (WIDTH, HEIGHT)


@pytest.mark.parametrize("data", [b"", b"\xff\xd8", b"\xff\xd8\xff\xff\xff", b"RIFF", png()[:18]])
def test_an_image_that_is_cut_off_has_no_size(data: bytes) -> None:
    """A flat figure replaces it, and nothing fails."""
    assert size_of(data) is None
    assert tokens_of_image(data, recipient("openai", "gpt-4o")) == 765


@pytest.mark.parametrize(
    ("provider", "model", "width", "height", "tokens"),
    [
        ("openai", "gpt-4o", 1024, 1024, 85 + 4 * 170),
        ("openai", "gpt-4o", 2048, 4096, 85 + 6 * 170),
        ("openai", "gpt-4o-mini", 512, 512, 2833 + 5667),
        ("openai", "gpt-4.1-mini", 1024, 1024, 1659),
        ("anthropic", "claude-sonnet-4-5", 200, 200, 64),
        ("anthropic", "claude-sonnet-4-5", 1092, 1092, 1521),
        ("anthropic", "claude-sonnet-4-5", 8000, 8000, 1600),
        ("bedrock", "us.anthropic.claude-opus-4-7", 2000, 2000, 4784),
        ("gemini", "gemini-2.5-flash", 300, 300, 258),
        ("gemini", "gemini-2.5-flash", 1500, 700, 2 * 258),
        ("gemini", "gemini-3-pro", 100, 100, 1120),
        ("gemini", "gemini-4-argon", 100, 100, 1120),
        ("bedrock", "amazon.nova-2-lite-v1:0", 900, 900, 230),
        ("bedrock", "amazon.nova-pro-v1:0", 900, 900, 1286),
    ],
)
def test_an_image_counts_by_the_rule_of_its_vendor(
    provider: str, model: str, width: int, height: int, tokens: int
) -> None:
    """The examples of the vendors' own pages come out, as far as they give any."""
    assert tokens_of_image(png(width, height), recipient(provider, model)) == tokens


def test_a_large_image_is_not_text() -> None:
    """Four hundred kilobytes of picture are some hundred tokens in a request, not 350,000."""
    model = ScriptedModel([], model_id="gpt-4o")
    image = {"image": {"format": "png", "source": {"bytes": png(size=400_000)}}}
    messages = [{"role": "user", "content": [{"text": "What is it?"}, image]}]
    assert 700 < projected_input(model, messages) < 800
    result = {"toolResult": {"toolUseId": "1", "status": "success", "content": [image]}}
    assert 700 < projected_input(model, [{"role": "user", "content": [result]}]) < 800


def pdf(pages: int, *, packed: bool = False) -> bytes:
    """Make something like a PDF."""
    objects = b"/Type /Pages /Count 9 " + b"<< /Type /Page /Parent 1 0 R >> " * pages
    if packed:
        head = b"<< /Type /ObjStm /Filter /FlateDecode >>\nstream\n"
        objects = head + zlib.compress(objects) + b"\nendstream"
    return b"%PDF-1.7\n" + objects


@pytest.mark.parametrize("packed", [False, True])
def test_the_pages_of_a_pdf(*, packed: bool) -> None:
    """They are counted, also where newer files pack them."""
    assert pages_of(pdf(7, packed=packed)) == 7


def test_documents() -> None:
    """A PDF counts by its pages, a text as text; what only links to one counts a flat figure."""
    claude = recipient("anthropic", "claude-sonnet-4-5")
    bedrock = recipient("bedrock", "us.anthropic.claude-sonnet-4-5")
    assert tokens_of_document(pdf(3), "pdf", claude, cited=False) == 3 * 2_300
    assert tokens_of_document(pdf(3), "pdf", bedrock, cited=False) == 3 * 600
    assert tokens_of_document(pdf(3), "pdf", bedrock, cited=True) == 3 * 2_300
    assert tokens_of_document(b"one two three", "txt", claude, cited=False) < 8
    assert tokens_of_document(None, "pdf", claude, cited=False) == 3_000


def wav() -> bytes:
    """Make two seconds of silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8_000)
        sound.writeframes(bytes(32_000))
    return file.getvalue()


FLAC = b"fLaC" + bytes(14) + (8_000 << 44 | 16_000).to_bytes(8, "big")
OPUS = b"OggS" + bytes(2) + bytes(8) + b"OpusHead" + b"OggS" + bytes(2) + struct.pack("<Q", 96_000)
MP4 = bytes(4) + b"ftypmp42" + b"moov" + b"mvhd" + struct.pack(">IIIII", 0, 0, 0, 600, 1_200)
SCALE = b"\x2a\xd7\xb1\x83" + (10**6).to_bytes(3, "big")
WEBM = b"\x1aE\xdf\xa3" + SCALE + b"\x44\x89\x88" + struct.pack(">d", 2_000.0)
MP3 = b"ID3\x03\x00\x00\x00\x00\x00\x00" + b"\xff\xfb\x90\x00" + bytes(31_996)


@pytest.mark.parametrize("data", [wav(), FLAC, OPUS, MP4, WEBM, MP3])
def test_a_duration(data: bytes) -> None:
    """It is read from the header of the container."""
    assert seconds_of(data) == pytest.approx(2, abs=0.01)


@pytest.mark.parametrize("data", [b"", b"RIFF____WAVEfmt ", b"OggS", b"fLaC", MP4[:20], MP3[:12]])
def test_media_without_duration_counts_a_flat_figure(data: bytes) -> None:
    """A minute is assumed."""
    assert seconds_of(data) is None
    assert tokens_of_audio(data, recipient("gemini", "gemini-2.5-pro")) == 60 * 32


def test_audio_and_video_count_by_the_second() -> None:
    """As vendors document it."""
    assert tokens_of_audio(wav(), recipient("openai", "gpt-4o-audio-preview")) == 20
    assert tokens_of_video(MP4, recipient("gemini", "gemini-2.5-pro")) == 2 * 263


def test_measured_content_is_not_estimated_again() -> None:
    """The vendor's figure for an earlier response holds; only what came later is estimated."""
    usage: Any = {"inputTokens": 5_000, "outputTokens": 100, "totalTokens": 5_100}
    messages = [
        {"role": "user", "content": [{"text": "x " * 90_000}]},
        {"role": "assistant", "content": [{"text": "y"}], "metadata": {"usage": usage}},
        {"role": "user", "content": [{"text": "and now?"}]},
    ]
    assert 5_100 < projected_input(ScriptedModel([]), messages) < 5_120
    usage.update(inputTokens=0, outputTokens=0, totalTokens=0)  # of an unmeasured call
    assert projected_input(ScriptedModel([]), messages) > 20_000
