"""Features of each framework: the tables of the page are what is observed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.features.observed import cell, features
from tests.features.page import NO, REASONS, SUBJECTS, documented

if TYPE_CHECKING:
    from tests.features.subject import Subject


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
@pytest.mark.parametrize("feature", features())
def test_cell_of_the_page_is_what_is_observed(feature: str, subject: Subject) -> None:
    """Run `python -m tests.generate frameworks` if this fails, and review the changes."""
    assert cell(feature, subject) == documented()[feature, subject.name]


def test_every_missing_feature_has_its_reason() -> None:
    """A reader need not guess whether it is the framework or otel-limits that lacks something."""
    assert {key for key, text in documented().items() if text == NO} == set(REASONS)
