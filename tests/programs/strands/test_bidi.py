"""Realtime agents under their former name."""

from __future__ import annotations

import subprocess
import sys


def test_former_name_is_limited() -> None:
    """Programs that still import the experimental package are limited in the same way."""
    program = """
import asyncio, warnings
warnings.simplefilter("ignore")
from strands.experimental.bidi import BidiAgent
import otel_limits
from tests.realtime import RealtimeModel

async def talk():
    async with BidiAgent(model=RealtimeModel(), name="voice") as agent:
        return [event async for event in agent.receive()][-1]

otel_limits.enable(max_turns=3)
print(otel_limits.stop_of(asyncio.run(talk())).turns)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "3\n"
