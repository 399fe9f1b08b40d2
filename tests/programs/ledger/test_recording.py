"""Recording by several processes, and what a process without a ledger imports."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ledger.fixtures import LedgerFile


SEEDED = """
import random
import otel_limits
from strands import Agent
from otel_limits.testing import ScriptedModel, says

otel_limits.enable()
for _ in range(5):
    random.seed(42)
    Agent(model=ScriptedModel([says("x")]), callback_handler=None)("go")
"""


def test_seeded_workers_lose_no_call(
    ledger: LedgerFile, program: Callable[..., subprocess.Popen[str]]
) -> None:
    """Four processes with the same seed, concurrently, in one ledger."""
    for child in [program(SEEDED) for _ in range(4)]:
        _, said = child.communicate(timeout=60)
        assert child.returncode == 0, said
    assert len(ledger.calls()) == 20


def test_no_ledger_costs_nothing() -> None:
    """Without a ledger SQLAlchemy is never imported."""
    program = (
        "import sys, otel_limits\n"
        "otel_limits.enable()\n"
        "from otel_limits.cli.parser import make_parser\n"
        "make_parser()\n"
        "print([name for name in sys.modules if name.startswith('sqlalchemy')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
