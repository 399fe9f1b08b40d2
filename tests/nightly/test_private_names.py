"""Programs whose framework lacks a private name: those that are not run often."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.programs.runtime.test_guard import OFTEN, breaks_no_agent, python
from tests.unit.strands.test_private import NAMES

if TYPE_CHECKING:
    from otel_limits.bindings.strands.private import PrivateName
    from tests.forking import Forking

__all__ = ["python"]


@pytest.mark.parametrize("missing", [each for each in NAMES if each not in OFTEN])
def test_other_missing_private_name_breaks_no_agent(python: Forking, missing: PrivateName) -> None:
    """`import strands` succeeds, and an agent runs to a halt or to its natural end."""
    breaks_no_agent(python, missing)
