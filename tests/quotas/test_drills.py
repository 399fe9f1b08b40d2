"""The drill for a store of quotas, in small; `python -m tests.drills quota-store` is it in full."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.drills.store import FAULTS, faults

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.usefixtures("faulty", "redis_installed")
def test_no_fault_of_a_store_loses_a_call_or_lets_one_pass(tmp_path: Path) -> None:
    """Late, cut, truncated and missing replies, with the times to wait that ship."""
    told = faults(tmp_path, 1)
    assert all(fault in told for fault in FAULTS)
