"""Estimates the tokens of images, documents, audio and video, by each vendor's rule."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Final, NamedTuple

from otel_limits.usage.media_files import pages_of, seconds_of, size_of
from otel_limits.usage.text import tokens_of_text
from otel_limits.vendors.records import media_rules, other_media, vendors_of_classes

if TYPE_CHECKING:
    from otel_limits.vendors.records import MediaRule

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
