"""Estimates of text, compared with the counts of a real tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from otel_limits.usage.text import as_json, tokens_of_text

TEXTS = json.loads((Path(__file__).parent / "texts.json").read_text(encoding="utf-8"))
"""Texts with the number of tokens that tiktoken's `o200k_base` makes of each. The articles are of
the Universal Declaration of Human Rights."""


@pytest.mark.parametrize("name", TEXTS)
def test_an_estimate_is_near_the_tokenizer(name: str) -> None:
    """Every language and every format is within 0.8 to 1.6 of its true number of tokens."""
    text, tokens = TEXTS[name]["text"], TEXTS[name]["o200k_base"]
    assert 0.8 <= tokens_of_text(text) / tokens <= 1.6


@pytest.mark.parametrize("name", ["english", "chinese", "python", "hex"])
def test_an_estimate_is_linear(name: str) -> None:
    """A text a hundred times as long has a hundred times the tokens."""
    text = TEXTS[name]["text"] + " "
    once = tokens_of_text(text * 10)
    assert tokens_of_text(text * 1000) == pytest.approx(once * 100, rel=0.01)


def test_bytes_are_never_text() -> None:
    """Non-text content is never written out, so it costs nothing here."""
    assert tokens_of_text(as_json({"data": b"\x00" * 1_000_000})) < 10


def test_any_text_can_be_estimated() -> None:
    """Half of a pair of surrogates is no character, and no error."""
    assert tokens_of_text("\ud800") > 0
    assert tokens_of_text("") == 0
