"""The list of prices, which Python 3.10 cannot have."""

from __future__ import annotations

import sys
from typing import Final

import pytest

listed: Final = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="genai-prices cannot be installed on Python 3.10"
)
"""Marks tests that need its prices."""
