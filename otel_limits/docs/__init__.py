"""The reference pages, as Markdown: what `otel-limits docs [TOPIC]` shows."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Final

SUFFIX: Final = ".md"

GENERATED: Final = re.compile(r"<!--.*?-->\n?", re.DOTALL)
"""Says what generates a table, which means nothing to a reader."""


def topics() -> tuple[str, ...]:
    """Return the name of every page, sorted."""
    names = (entry.name for entry in files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)))


def page(topic: str) -> str:
    """Return the text of a page.

    Raises:
        KeyError: There is no page of this name.
    """
    # Compared with the names that exist: a topic is user input, and `../x` must not be opened.
    if topic not in topics():
        raise KeyError(topic)
    text = files(__name__).joinpath(topic + SUFFIX).read_text(encoding="utf-8")
    return GENERATED.sub("", text)
