"""Model calls outside the agent's loop, in a ledger."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits import disable, enable
from otel_limits.cli import main
from otel_limits.testing import ScriptedModel, says, tokens
from tests.unit.test_tracked_requests import asking, read

if TYPE_CHECKING:
    from tests.ledger.fixtures import LedgerFile


@pytest.fixture
def late(ledger: LedgerFile) -> LedgerFile:
    """A ledger with an invocation of two calls, one of its tool and one after its end."""
    enable()
    helper = ScriptedModel([says("x", usage=tokens(100))] * 2, model_id="helper")

    async def main() -> None:
        ended, tasks = asyncio.Event(), []

        async def later() -> None:
            await ended.wait()
            await read(helper)

        async def ask() -> str:
            tasks.append(asyncio.create_task(later()))
            return await read(helper)

        await asking(ask).invoke_async("go")
        ended.set()
        await tasks[0]

    asyncio.run(main())
    disable()  # the agent has waited for its own rows only
    return ledger


def ask(capsys: pytest.CaptureFixture[str], *question: str) -> Any:
    """Ask, and read the answer."""
    capsys.readouterr()
    assert main(["audit", *question, "--format", "json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_a_side_call_is_marked(late: LedgerFile) -> None:
    """Each row says it, those after the end too, and each number is there once."""
    # By number: what a slow moment had spilled reaches the database after what came later.
    rows = sorted(late.calls(), key=lambda row: row["number"])
    assert [(row["number"], row["model"], row["side"]) for row in rows] == [
        (1, "scripted", 0),
        (2, "helper", 1),
        (3, "scripted", 0),
        (4, "helper", 1),
    ]
    assert len({row["invocation_id"] for row in rows}) == 1


def test_spend_separates_side_calls(late: LedgerFile, capsys: pytest.CaptureFixture[str]) -> None:
    """They can be grouped by, and asked for alone."""
    rows = ask(capsys, "spend", "--by", "side")["spend"]
    assert {row["side"]: (row["calls"], row["tokens"]) for row in rows} == {
        "yes": (2, 200),
        "no": (2, 30),
    }
    chosen = ask(capsys, "spend", "--by", "model", "--where", "side=yes")["spend"]
    assert [(row["model"], row["calls"]) for row in chosen] == [("helper", 2)]


def test_show_counts_side_calls(late: LedgerFile, capsys: pytest.CaptureFixture[str]) -> None:
    """An invocation has all of its calls in its tree, and says how many its loop did not make."""
    (invocation,) = late.invocations()
    (row,) = ask(capsys, "show", invocation["id"])["tree"]
    assert (row["calls"], row["side_calls"], row["tokens"]) == (4, 2, 230)
