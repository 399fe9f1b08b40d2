"""A simulated month, its bills, and what `audit reconcile` must find in them."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import pickle
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from otel_limits.cli import main
from tests.bills import exports, month
from tests.wire.run import ENVIRONMENT

if TYPE_CHECKING:
    from tests.bills.billed import BilledCall, Vendor

TITLES: Final[Mapping[Vendor, str]] = {
    "openai": "OpenAI",
    "anthropic": "Anthropic",
    "openrouter": "OpenRouter",
    "litellm": "LiteLLM",
}
AHEAD: Final = timedelta(hours=9)
TOKYO: Final = timezone(AHEAD)
"""The time zone of OpenAI's bill, and of one day of OpenRouter's."""
CENT: Final = Decimal("0.01")


@dataclass(frozen=True)
class Month:
    """A ledger, and the calls on the vendors' bills."""

    folder: Path
    calls: Sequence[BilledCall]

    def of(self, *vendors: Vendor) -> list[BilledCall]:
        """The calls on the bills of vendors."""
        return [call for call in self.calls if call.vendor in vendors]

    def cost(self, *vendors: Vendor) -> Decimal:
        """USD on their bills, exactly."""
        return sum((call.cost for call in self.of(*vendors)), Decimal(0))

    def write_bills(self, *, has_other_zone: bool = False) -> list[str]:
        """Write the bills of all vendors, and return the files."""
        openai, anthropic, routed, proxied = map(self.of, TITLES)
        evening = next(call.day() for call in routed if (call.at + AHEAD).date() != call.day())
        day = evening if has_other_zone else None
        write_logs = exports.litellm_json if has_other_zone else exports.litellm_csv
        texts = {
            "openai-usage": exports.openai_usage(openai, TOKYO),
            "openai-costs": exports.openai_costs(openai, TOKYO),
            "anthropic-usage": exports.anthropic_usage(anthropic),
            "anthropic-costs": exports.anthropic_costs(anthropic),
            "openrouter": [exports.openrouter(routed, day, AHEAD)],
            "litellm": [write_logs(proxied)],
        }
        files = []
        for name, pages in texts.items():
            for number, text in enumerate(pages):
                files.append(self.folder / f"{name}-{number}")
                files[-1].write_text(text, encoding="utf-8")
        return [str(file) for file in files]

    def estimates(self) -> Decimal:
        """USD of the calls that the ledger estimated."""
        with contextlib.closing(sqlite3.connect(self.folder / "ledger.db")) as connection:
            query = "SELECT sum(price_pico) FROM otel_limits_model_calls WHERE estimated"
            (pico,) = connection.execute(query).fetchone()
        return Decimal(pico).scaleb(-12)

    def ask(self, *words: str) -> tuple[int, str]:
        """Run a command with the ledger, and return its exit status and its output."""
        variables = {
            "OTEL_LIMITS_LEDGER": str(self.folder / "ledger.db"),
            "OTEL_LIMITS_POLICY": str(self.folder / "policy.yaml"),
        }
        with patch.dict(os.environ, variables), contextlib.redirect_stdout(io.StringIO()) as out:
            return main(list(words)), out.getvalue()

    def reconcile(self, files: Sequence[str]) -> tuple[int, Mapping[str, Any]]:
        """Compare the ledger with bills."""
        status, out = self.ask("audit", "reconcile", "--bill", *files, "--format", "json")
        return status, json.loads(out, parse_float=Decimal)


def simulate(folder: Path, calls: int, *, has_differences: bool) -> Month:
    """Let agents make the calls of a month, in a process with its own wall clock."""
    words = ["differences"] if has_differences else []
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", month.__name__, str(folder), str(calls), *words],
        check=True,
        env={**os.environ, **ENVIRONMENT},
    )
    return Month(folder, pickle.loads((folder / "calls.pickle").read_bytes()))  # noqa: S301


def assert_reconciles_to_the_cent(found: Month) -> None:
    """Every day and model has the same tokens and the same cost on both sides."""
    status, answer = found.reconcile(found.write_bills())
    assert status == 0
    billed: defaultdict[str, Decimal] = defaultdict(Decimal)
    for row in answer["bill_cost"]:
        assert abs(Decimal(row["difference"])) < CENT, row
        billed[row["vendor"]] += Decimal(row["billed"])
    for vendor, title in TITLES.items():
        assert round(billed[title], 2) == round(found.cost(vendor), 2)
    assert {row["difference"] for row in answer["bill_tokens"]} <= {0}
    assert {row["cause"] for row in answer.get("bill_parts", ())} <= {"rounding"}


def assert_every_difference_has_its_cause(found: Month) -> None:
    """Lost, unpriced and estimated calls and those of another zone are named, each with its USD."""
    _, answer = found.reconcile(found.write_bills(has_other_zone=True))
    parts: defaultdict[tuple[str, str], list[Any]] = defaultdict(list)
    for part in answer["bill_parts"]:
        parts[part["vendor"], part["cause"]].append(part)
    causes = {key for key in parts if key[1] != "rounding"}
    assert causes == {
        ("OpenAI", "unpriced"),
        ("OpenAI", "estimated"),
        ("Anthropic", "only on the bill"),
        ("OpenRouter", "on another day"),
    }
    # The order in which the month has them.
    calls = iter(found.calls)
    unpriced, silent, lost = (
        sum((call.cost for call in itertools.islice(calls, number)), Decimal(0))
        for number in (month.UNPRICED, month.SILENT, month.LOST)
    )
    (part,) = parts["OpenAI", "unpriced"]
    assert (part["calls"], Decimal(part["cost"])) == (month.UNPRICED, unpriced)
    (part,) = parts["OpenAI", "estimated"]
    assert (part["calls"], Decimal(part["cost"])) == (month.SILENT, silent - found.estimates())
    (part,) = parts["Anthropic", "only on the bill"]
    # Anthropic's reports do not count requests.
    assert (part["calls"], Decimal(part["cost"])) == (None, lost)
    assert sum(Decimal(part["cost"]) for part in parts["OpenRouter", "on another day"]) == 0
    for row in answer["bill_cost"]:
        assert abs(Decimal(row["unexplained"])) == 0, row
