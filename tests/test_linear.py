"""Text from outside takes CPU in proportion to its length, with any content."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Final

import pytest

from otel_limits.bindings.gateways import budget_refusal
from otel_limits.core.labels import clean
from otel_limits.core.listings import listing_of, vendor_of
from otel_limits.core.loops import fingerprint
from otel_limits.core.regions import area_of, premium
from otel_limits.core.wording import closest_match
from otel_limits.settings import environment
from otel_limits.settings.table import SETTINGS
from otel_limits.usage.pages import pages_of
from otel_limits.usage.span_texts import estimates_of_span
from otel_limits.usage.text import tokens_of_text


class RefusedError(Exception):
    """A vendor's refusal."""

    status_code = 429


def refuse(text: str) -> None:
    """Classify the text of an error."""
    budget_refusal(RefusedError(f"{text}ai.google.dev"))


def identify(model: str) -> None:
    """Find the vendor, the price list's name and the region of a model ID."""
    vendor_of(model, model)
    listing_of(model, model, known=False)
    premium("google", model, "europe")
    area_of(model)


def configure(value: str) -> None:
    """Read the value as that of every setting."""
    for setting in SETTINGS:
        environment.read({setting.variable: value})


def misspell(name: str) -> None:
    """Read a setting with an unknown name."""
    environment.read({f"OTEL_LIMITS_{name}": "1"})
    closest_match(name, [setting.name for setting in SETTINGS])


QUOTA: Final = "exceeded your current quota, please check your plan and billing details "

DOORS: Final[Mapping[str, tuple[Callable[[str], object], int, tuple[str, ...]]]] = {
    "PDF": (lambda text: pages_of(text.encode()), 20_000, ("/Type/ObjStm ", "/Type ", " ")),
    "error": (refuse, 100_000, (QUOTA, "quotaId ", "a")),
    "model": (identify, 10_000, ("gemini-3", "claude-", "us.", "/us-a", "a/", "-1")),
    "label": (clean, 100_000, ("a", "\n", "\ud800")),
    "arguments": (lambda text: fingerprint(text, {text: text}), 20_000, ("a", "é")),
    "prompt": (tokens_of_text, 50_000, ("a", "é ", "1", "日本")),
    "span": (
        lambda text: estimates_of_span({"gen_ai.input.messages": text}, [], "gpt-4o"),
        20_000,
        ("data:a/b;", "data:image/png;base64,", "[", '{"a":', '"'),
    ),
    "setting": (configure, 2_500, ("a", "9", "1,", "@", "{")),
    "address": (
        lambda text: environment.read({"OTEL_LIMITS_QUOTA_STORE": f"redis://{text}"}),
        5_000,
        ("/", "/a", ",a:1", "?a=b&"),
    ),
    "name": (misspell, 5_000, ("A", "MAX_")),
}
"""Functions that take a text, a length to begin with, and the units to repeat."""

CASES: Final = [
    pytest.param(take, length, unit, id=f"{name}-{unit.strip()[:20]!a}")
    for name, (take, length, units) in DOORS.items()
    for unit in units
]


@pytest.mark.parametrize(("take", "length", "unit"), CASES)
def test_twice_the_length_takes_at_most_two_and_a_half_times_the_cpu(
    take: Callable[[str], object], length: int, unit: str
) -> None:
    """Twice in a row, which is easier to measure: a quadratic one would take 16 times the CPU."""

    def seconds(length: int) -> float:
        text = (unit * length)[:length]
        times = []
        for _ in range(3):
            begin = time.process_time()
            with contextlib.suppress(ValueError):
                take(text)
            times.append(time.process_time() - begin)
        return min(times)  # the least disturbed by other processes

    assert seconds(4 * length) <= 2.5**2 * max(seconds(length), 0.002)
