"""The page on how it works, and the way of a model call that is observed."""

from __future__ import annotations

from tests.readme import DOCS, OBSERVED, with_tables


def test_page_shows_the_files_through_which_a_call_goes() -> None:
    """Run `python -m tests.generate tables` when this fails."""
    page = (DOCS / "how-it-works.md").read_text("utf-8")
    assert with_tables(page, OBSERVED) == page
