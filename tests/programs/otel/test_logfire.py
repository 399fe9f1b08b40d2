"""Logfire's proxy tracer provider: invocations under it are sampled."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from otel_limits.otel.provider import sdk_provider
from tests.paths import SCRIPTS

if TYPE_CHECKING:
    from typing import Any

pytest.importorskip("logfire")

PROGRAM = SCRIPTS / "with_logfire.py"


@pytest.mark.parametrize("order", ["configure-first", "enable-first"])
def test_invocation_under_logfire_is_tracked_by_its_span(order: str) -> None:
    """Its spans arrive even if Logfire was configured before us."""
    done = subprocess.run(
        [sys.executable, PROGRAM, order], capture_output=True, text=True, timeout=100, check=True
    )
    told = json.loads(done.stdout)
    assert told == {"unsampled": [False], "reason": "max_turns", "calls": 3, "cycles": 3}


def test_self_referencing_provider_ends_search() -> None:
    """The search for the real provider ends, whatever the attribute holds."""

    class Endless:
        @property
        def provider(self) -> Any:
            return self

    assert sdk_provider(Endless()) is None
