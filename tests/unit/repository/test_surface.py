"""The list of everything that users write, read or import."""

from __future__ import annotations

from tests import surface


def test_surface_is_the_one_that_is_listed() -> None:
    """A change that users notice is made on purpose: `python -m tests.generate surface`."""
    assert surface.text().splitlines() == surface.PATH.read_text(encoding="utf-8").splitlines()
