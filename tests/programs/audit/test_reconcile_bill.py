"""A ledger against bills: of a gateway's log, and of a month at four vendors."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from tests.bills.reconciled import (
    assert_every_difference_has_its_cause,
    assert_reconciles_to_the_cent,
    simulate,
)
from tests.launching import fresh_environment

if TYPE_CHECKING:
    from pathlib import Path


AGENT = """
import otel_limits
from strands import Agent, tool
from otel_limits.testing import ScriptedModel, endless, uses

otel_limits.enable(otel_limits.Limits(max_turns=4))

@tool
def look() -> str:
    "Look."
    return "nothing"

model = ScriptedModel(endless(uses("look")))
Agent(model=model, tools=[look], callback_handler=None, name="worker")("go")
"""
CALLS = "SELECT at_us, input_tokens, output_tokens, model FROM otel_limits_model_calls"


def test_a_call_that_only_the_gateway_has_is_found(tmp_path: Path) -> None:
    """A log with one call more is status 1, and the answer names the call and its cost."""
    ledger, log = tmp_path / "ledger.db", tmp_path / "log.jsonl"
    environment = fresh_environment(OTEL_LIMITS_LEDGER=str(ledger), OTEL_LIMITS_LEDGER_SYNC="call")
    subprocess.run([sys.executable, "-c", AGENT], check=True, env=environment, capture_output=True)
    with closing(sqlite3.connect(ledger)) as connection:
        calls = connection.execute(CALLS).fetchall()
    rows = [
        {
            "request_id": f"request-{number}",
            "startTime": datetime.fromtimestamp(at_us / 1e6, timezone.utc).isoformat(),
            "spend": 0.25,
            "prompt_tokens": sent,
            "completion_tokens": received,
            "model": model,
        }
        for number, (at_us, sent, received, model) in enumerate([*calls, calls[0]])
    ]
    log.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    command = [sys.executable, "-m", "otel_limits.cli", "audit", "reconcile", "--bill"]
    # The same file twice counts once.
    answer = subprocess.run(
        [*command, str(log), str(log)], env=environment, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 1, answer.stderr
    assert (
        "LiteLLM: $1.25 billed, $0.00 in the ledger, without 4 calls of unknown price. Difference "
        "$1.25: unpriced $1.00, only on the bill $0.25, unexplained $0.00." in answer.stdout
    )


# --- a month at four vendors ----------------------------------------------------------------------

CALLS_OF_MONTH = 124
"""One agent a day."""


def test_month_reconciles_to_the_cent(tmp_path: Path) -> None:
    """Every token and every price is that of the vendors."""
    found = simulate(tmp_path, CALLS_OF_MONTH, has_differences=False)
    assert_reconciles_to_the_cent(found)
    # The gateway's log has the calls that its agents recorded, and adds none.
    _, out = found.ask("ledger", "import", str(tmp_path / "litellm-0"))
    assert out.endswith(f"{len(found.of('litellm'))} model calls were already in the ledger.\n")
    assert_reconciles_to_the_cent(found)


def test_differences_of_a_month_have_their_causes(tmp_path: Path) -> None:
    """Nothing is unexplained."""
    assert_every_difference_has_its_cause(simulate(tmp_path, CALLS_OF_MONTH, has_differences=True))
