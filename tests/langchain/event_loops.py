"""Python 3.10, where LangGraph passes no context to asynchronous nodes."""

from __future__ import annotations

import sys
from typing import Any, Final

import pytest

NO_CONTEXT: Final = "LangGraph passes no context to asynchronous nodes on Python 3.10"
"""They can neither be interrupted nor stream."""

with_context: Final = pytest.mark.skipif(sys.version_info < (3, 11), reason=NO_CONTEXT)
"""Marks tests that need it."""


def in_loop(case: object) -> Any:
    """Return a case of a test that needs it."""
    return pytest.param(case, marks=with_context)
