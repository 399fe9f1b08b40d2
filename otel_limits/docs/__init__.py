"""The pages of the documentation, one Markdown file each in this folder."""

from __future__ import annotations

from importlib.resources import files

SUFFIX = ".md"


def topics() -> tuple[str, ...]:
    """Return the names of the pages, in order."""
    names = (each.name for each in files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)))


def page(topic: str) -> str:
    """Return a page as Markdown.

    Raises:
        KeyError: There is no page about `topic`.
    """
    if topic not in topics():
        raise KeyError(topic)
    return files(__name__).joinpath(topic + SUFFIX).read_text(encoding="utf-8")
