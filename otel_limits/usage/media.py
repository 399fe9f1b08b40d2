"""Estimates the tokens of images, documents, audio and video, by each vendor's rule."""

from __future__ import annotations

import functools
import math
import re
from typing import Final, Literal, NamedTuple, TypeAlias

from otel_limits.usage.durations import seconds_of
from otel_limits.usage.pages import pages_of
from otel_limits.usage.pictures import size_of
from otel_limits.usage.text import tokens_of_text

Vendor: TypeAlias = Literal[
    "claude", "gemini", "gemini-3", "nova", "nova-2", "openai-patches", "openai-tiles", "other"
]

CLAUDE_EDGE: Final = 1568
CLAUDE_TOKENS: Final = 1_600
"""Maximum long edge and tokens of an image after downscaling:
https://platform.claude.com/docs/en/build-with-claude/vision. Models since 4.7 allow more, see
`CLAUDE_LARGE`."""
CLAUDE_LARGE: Final = (2576, 4_784)
CLAUDE_PATCH: Final = 28

PATCH: Final = 32
MAX_PATCHES: Final = 1_536
"""For models that count patches: https://developers.openai.com/api/docs/guides/images-vision."""
FACTORS: Final = (("nano", 2.46), ("o4-mini", 1.72), ("mini", 1.62))
"""Tokens per patch, by a part of the model's name, on the same page. Others have 1.2, as measured:
https://community.openai.com/t/1372291."""

TILES: Final = (("gpt-4o-mini", 2833, 5667), ("gpt-5", 70, 140), ("o1", 75, 150), ("o3", 75, 150))
"""Tokens of an image and of each 512-pixel tile, on the same page; other models have 85 and 170."""
TILE: Final = 512
TILED_BOX: Final = 2048
TILED_SIDE: Final = 768

GEMINI_SMALL: Final = 384
GEMINI_TILE: Final = 768
GEMINI_TOKENS: Final = 258
"""One tile up to 384 pixels, otherwise tiles of 768: https://ai.google.dev/gemini-api/docs/tokens."""
GEMINI_3_TOKENS: Final = 1_120
"""The same since Gemini 3, at its default resolution, for any size:
https://ai.google.dev/gemini-api/docs/media-resolution."""

NOVA_PIXELS: Final = 630
"""Pixels per token: about 800, 1,300 and 2,600 tokens for 900x450, 900x900 and 1300x1300:
https://docs.aws.amazon.com/nova/latest/userguide/modalities-image.html."""
NOVA_2_TOKENS: Final = 230
"""Billed for every image:
https://docs.aws.amazon.com/nova/latest/nova2-userguide/using-multimodal-models.html."""

FLAT_SIZE: Final = (1_024, 1_024)
"""Assumed for an image that is unreadable or only linked."""
FLAT_SECONDS: Final = 60.0
"""Assumed for audio and video with an unreadable duration."""
FLAT_DOCUMENT: Final = 3_000
"""Assumed tokens of an office document, or of a linked one."""

PAGE: Final[dict[Vendor, int]] = {"claude": 2_300, "gemini": 258, "gemini-3": 560}
PAGE_OF_OTHERS: Final = 1_400
"""Tokens of a PDF page: its text and an image of it. "Each page typically uses 1,500-3,000 tokens":
https://platform.claude.com/docs/en/build-with-claude/pdf-support; measured: 2,100 to 2,480.
Google: https://ai.google.dev/gemini-api/docs/document-processing and /media-resolution. Assumed
for others."""
PAGE_AS_TEXT: Final = 600
"""For a page that is read as text only, as in Bedrock's Converse without citations:
https://platform.claude.com/docs/en/build-with-claude/pdf-support, "Amazon Bedrock PDF support"."""

AUDIO: Final[dict[Vendor, float]] = {"openai-tiles": 10.0, "openai-patches": 10.0}
AUDIO_OF_OTHERS: Final = 32.0
"""Tokens per second: https://ai.google.dev/gemini-api/docs/audio. OpenAI's is 10, derived from its
prices per minute: https://community.openai.com/t/971012."""
VIDEO: Final = 263.0
"""Tokens per second, without sound: https://ai.google.dev/gemini-api/docs/tokens."""

TEXTS: Final = frozenset({"csv", "html", "md", "txt"})

OPENAI_CLASSES: Final = ("openai", "openai_responses")
OPENAI: Final = re.compile(r"\b(gpt-\d|o[134]\b|o[134]-|chatgpt|computer-use)")
BY_PATCHES: Final = re.compile(r"(gpt-(4\.1|5)[\w.]*-(mini|nano))|o4-mini|gpt-5\.[2-9]|gpt-[6-9]")
FROM_GEMINI_3: Final = re.compile(r"gemini-([3-9]|\d\d)(\D|$)")
LARGE_CLAUDE: Final = re.compile(r"claude-[a-z]+-(4-[7-9]|[5-9])(\D|$)")


class Recipient(NamedTuple):
    """The recipient of a request: vendors count the same image differently."""

    provider: str
    """The framework's module for the provider."""
    model: str
    """In lower case."""
    vendor: Vendor
    """The vendor that determines the rule."""


@functools.lru_cache(256)
def recipient(provider: str, model: str) -> Recipient:
    """Return the recipient, by the name of the model or else by the provider."""
    model = model.lower()
    # In this order: a newer model's name contains the older one's.
    rules: tuple[tuple[Vendor, bool], ...] = (
        ("claude", "claude" in model or provider == "anthropic"),
        ("gemini-3", FROM_GEMINI_3.search(model) is not None),
        ("gemini", "gemini" in model or provider == "gemini"),
        ("nova-2", "nova-2" in model),
        ("nova", "nova" in model),
        ("openai-patches", BY_PATCHES.search(model) is not None),
        ("openai-tiles", OPENAI.search(model) is not None or provider in OPENAI_CLASSES),
    )
    return Recipient(provider, model, next((rule for rule, holds in rules if holds), "other"))


def tokens_of_image(data: bytes | None, to: Recipient) -> int:
    """Return the tokens of an image, by the size in its header."""
    width, height = (size_of(data) if data is not None else None) or FLAT_SIZE
    vendor, model = to.vendor, to.model
    # These two are flat, for images of any size.
    if vendor in ("gemini-3", "nova-2"):
        return GEMINI_3_TOKENS if vendor == "gemini-3" else NOVA_2_TOKENS
    if vendor == "gemini":
        return _gemini(width, height)
    if vendor == "nova":
        return math.ceil(width * height / NOVA_PIXELS)
    if vendor == "openai-tiles":
        return _tiles(width, height, model)
    if vendor == "openai-patches":
        return _patches(width, height, model)
    return _claude(width, height, large=LARGE_CLAUDE.search(model) is not None)


def _gemini(width: int, height: int) -> int:
    if max(width, height) <= GEMINI_SMALL:
        return GEMINI_TOKENS
    return GEMINI_TOKENS * math.ceil(width / GEMINI_TILE) * math.ceil(height / GEMINI_TILE)


def _tiles(width: int, height: int, model: str) -> int:
    scale = min(1, TILED_BOX / max(width, height))
    # The smaller one results from OpenAI's two steps: into the box, then to the shorter side.
    scale = min(scale, TILED_SIDE / min(width, height))
    number = math.ceil(width * scale / TILE) * math.ceil(height * scale / TILE)
    base, each = next((tokens for name, *tokens in TILES if name in model), (85, 170))
    return base + each * number


def _patches(width: int, height: int, model: str) -> int:
    number = math.ceil(width / PATCH) * math.ceil(height / PATCH)
    factor = next((factor for name, factor in FACTORS if name in model), 1.2)
    return math.ceil(min(number, MAX_PATCHES) * factor)


def _claude(width: int, height: int, *, large: bool) -> int:
    edge, most = CLAUDE_LARGE if large else (CLAUDE_EDGE, CLAUDE_TOKENS)
    scale = min(1, edge / max(width, height))
    patches = [math.ceil(side * scale / CLAUDE_PATCH) for side in (width, height)]
    # Capped at the vendor's maximum.
    return min(most, math.prod(patches))


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
    page = PAGE.get(to.vendor, PAGE_OF_OTHERS)
    # Converse reads the text of a page, and with citations also its image.
    return pages_of(data) * (PAGE_AS_TEXT if to.provider == "bedrock" and not cited else page)


def tokens_of_audio(data: bytes | None, to: Recipient) -> int:
    """Return the tokens of audio, by the duration in its container."""
    return math.ceil(_seconds(data) * AUDIO.get(to.vendor, AUDIO_OF_OTHERS))


def tokens_of_video(data: bytes | None, to: Recipient) -> int:  # noqa: ARG001  same as the others
    """Return the tokens of a video, by the duration in its container."""
    return math.ceil(_seconds(data) * VIDEO)


def _seconds(data: bytes | None) -> float:
    return (seconds_of(data) if data is not None else None) or FLAT_SECONDS
