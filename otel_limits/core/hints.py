"""Guesses what somebody meant who mistyped a name."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def meant(name: str, known: Collection[str]) -> str | None:
    """Return the known name that is nearest, if one is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return near[0] if near else None
