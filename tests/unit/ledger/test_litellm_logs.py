"""LiteLLM's spend logs: model calls of a gateway that no agent recorded."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sqlite3
from typing import TYPE_CHECKING, Any, Final

import pytest

from otel_limits.cli import main
from tests.ledger.book import NINE, Call, Entry, write
from tests.price_list import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.ledger.fixtures import LedgerFile

ROW: Final[Mapping[str, Any]] = {
    "request_id": "chatcmpl-1",
    "call_type": "acompletion",
    "api_key": "88dc28d0f030c55ed4ab77ed8faf098196cb1c05df778539800c9f1243fe6b4b",
    "spend": 0.00543,
    "total_tokens": 3610,
    "prompt_tokens": 3410,
    "completion_tokens": 200,
    "startTime": "2026-03-01T12:00:04.000000Z",
    "endTime": "2026-03-01T12:00:05.250000Z",
    "model": "claude-sonnet-4-5-20250929",
    "model_group": "smart",
    "custom_llm_provider": "anthropic",
    "cache_hit": "False",
    "end_user": "joe@example.com",
    "session_id": "s1",
    "status": "success",
    "messages": {},
    "response": {},
    "metadata": {
        "status": None,
        "usage_object": {
            "prompt_tokens": 3410,
            "completion_tokens": 200,
            "prompt_tokens_details": {
                "cached_tokens": 3000,
                "cache_creation_tokens": 400,
                "cache_creation_token_details": {"ephemeral_1h_input_tokens": 100},
            },
        },
        "additional_usage_values": {"cache_read_input_tokens": 3000},
    },
}
TOKENS: Final = (
    "input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens",
    "cache_write_1h_tokens",
)  # fmt: skip


def as_csv(*rows: Mapping[str, Any]) -> str:
    """Rows as PostgreSQL's `COPY … CSV HEADER` writes them."""
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    for row in rows:
        values = {
            name: json.dumps(value) if isinstance(value, dict) else value
            for name, value in row.items()
        }
        for name in ("startTime", "endTime"):
            values[name] = str(row[name]).replace("T", " ").rstrip("Z").rstrip("0").rstrip(".")
        table.writerow(values)
    return text.getvalue()


FORMS: Final[Mapping[str, Callable[[Mapping[str, Any]], str]]] = {
    "the rows of /spend/logs": lambda row: json.dumps([row]),
    "a page of /spend/logs/v2": lambda row: json.dumps(
        {"data": [row], "total": 1, "page": 1, "page_size": 50, "total_pages": 1}, indent=1
    ),
    "JSON lines of the database": json.dumps,
    "CSV of the database": as_csv,
    "CSV with a prompt of several lines": lambda row: as_csv(
        {**row, "messages": [{"content": 'A "prompt",\nwith {lines}\n' + "x" * 200_000}]}
    ),
    "CSV from Windows": lambda row: "\ufeff" + as_csv(row).replace("\n", "\r\n"),
}


def imported(tmp_path: Path, *rows: Mapping[str, Any]) -> None:
    """Import rows as JSON."""
    path = tmp_path / "spend.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    assert main(["ledger", "import", str(path)]) == 0


def changed(number: int, **changes: object) -> dict[str, Any]:
    """The row of another request."""
    return {**ROW, "request_id": f"chatcmpl-{number}", **changes}


@listed
def test_row_counts_once_in_all_forms(ledger: LedgerFile, tmp_path: Path) -> None:
    """They have one identity, `request_id`, so importing each of them again adds nothing."""
    for number, write_form in enumerate(FORMS.values()):
        path = tmp_path / f"{number}.gz"
        path.write_bytes(gzip.compress(write_form(ROW).encode()))
        assert main(["ledger", "import", str(path)]) == 0
        (call,) = ledger.calls()
        assert [call[name] for name in TOKENS] == [3410, 200, 3000, 400, 100]
    assert (call["agent"], call["model"], call["provider"]) == (
        "litellm", "claude-sonnet-4-5-20250929", "anthropic",
    )  # fmt: skip
    assert (call["at_us"], call["duration_us"]) == (1_772_366_405_250_000, 1_250_000)
    # Per million tokens 3 / 0.30 / 3.75 (6 for an hour) / 15 USD.
    assert call["price_pico"] == 30_000_000 + 900_000_000 + 1_725_000_000 + 3_000_000_000
    # The gateway's own price is compared with it.
    assert (call["price_source"], call["stated_pico"]) == ("genai-prices", 5_430_000_000)
    (invocation,) = ledger.invocations()
    assert (invocation["session_id"], invocation["model_calls"]) == ("s1", 1)
    assert main(["audit", "verify"]) == 0


KINDS: Final[Mapping[str, tuple[Mapping[str, Any], Any]]] = {
    "a stream": ({"call_type": "atext_completion"}, ("measured", 3410, "standard")),
    "Responses": ({"call_type": "aresponses"}, ("measured", 3410, "standard")),
    "Messages": ({"call_type": "anthropic_messages"}, ("measured", 3410, "standard")),
    "a pass-through": ({"call_type": "pass_through_endpoint"}, ("measured", 3410, "standard")),
    "realtime": ({"call_type": "_arealtime"}, ("measured", 3410, "standard")),
    "a batch": ({"call_type": "aretrieve_batch"}, ("measured", 3410, "batch")),
    # The columns have the tokens of the cached answer, and the spend is 0.
    "a cache hit": (
        {"cache_hit": "True", "request_id": "chatcmpl-1_cache_hit1772366405.2", "spend": 0},
        ("zero", 0, "standard"),
    ),
    "a failure": (
        {"status": "failure", "prompt_tokens": 0, "completion_tokens": 0, "metadata": {}},
        ("failed", 0, "standard"),
    ),
    "a stream that failed": ({"status": "failure"}, ("measured", 3410, "standard")),
    # Zero is what the columns have if the gateway did not find the usage.
    "an unknown usage": (
        {"prompt_tokens": 0, "completion_tokens": 0, "metadata": None},
        ("unmeasured", 0, "standard"),
    ),
    "flex": ({"metadata": {"usage_object": {"service_tier": "flex"}}}, ("measured", 3410, "flex")),
    "an embedding": ({"call_type": "aembedding"}, None),
    "an image": (
        {"call_type": "aimage_generation", "prompt_tokens": 0, "completion_tokens": 0},
        None,
    ),
    "a reranking": ({"call_type": "arerank", "prompt_tokens": 0, "completion_tokens": 0}, None),
    "a tool of MCP": (
        {"call_type": "call_mcp_tool", "model": "", "prompt_tokens": 0, "completion_tokens": 0},
        None,
    ),
}


def test_rows_are_calls_by_their_kind(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row without a model call is none, and its tokens are reported as not counted."""
    rows = [
        changed(n, session_id=name, **({"end_user": name} | dict(changes)))
        for n, (name, (changes, _)) in enumerate(KINDS.items())
    ]
    imported(tmp_path, *rows)
    calls = {
        each["session_id"]: call
        for each in ledger.invocations()
        for call in ledger.calls()
        if call["invocation_id"] == each["id"]
    }
    found = {
        name: (calls[name]["state"], calls[name]["input_tokens"], calls[name]["tier"])
        if name in calls
        else None
        for name in KINDS
    }
    assert found == {name: right for name, (_, right) in KINDS.items()}
    assert len(ledger.invocations()) == len(calls)
    out = capsys.readouterr().out
    assert "1 span reports 3,610 tokens that are not counted" in out
    assert "model call: aembedding." in out
    rest = "as the gateway states a cost without tokens: aimage_generation, arerank, call_mcp_tool."
    assert f"3 spans are not counted, {rest}" in out
    assert main(["audit", "spend"]) == 0
    assert "4 spans with 3,610 tokens were not counted (" in capsys.readouterr().out


@pytest.mark.parametrize("keys", ["", "end_user,team_id"])
def test_end_user_is_stored_if_asked_for(
    ledger: LedgerFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: str
) -> None:
    """The log has whom each call was for, its keys and, if configured, its prompts."""
    monkeypatch.setenv("OTEL_LIMITS_AUDIT_KEYS", keys)
    # One session may have several users.
    imported(tmp_path, ROW, changed(2, end_user="eve@example.com"), changed(3, end_user=None))
    right = ["eve@example.com", "joe@example.com"] if keys else []
    assert sorted(ledger.attributes().values()) == right
    assert len(ledger.invocations()) == 3
    assert b"88dc28d0" not in ledger.path.read_bytes()


LIVE: Final = Call(input=3410, output=200, model="litellm_proxy/smart", price="0.1")
AT: Final = {"startTime": "2025-10-09T08:59:59.5Z", "endTime": "2025-10-09 09:00:00.25+00"}
"""The same time as the recorded call."""


@pytest.mark.parametrize(
    ("changes", "calls"),
    [
        ({}, 1),
        ({"model": "smart", "model_group": None}, 1),
        # The agent saw the tokens of the cached answer.
        ({"cache_hit": "True"}, 1),
        ({"startTime": "2025-10-09T08:59:50Z", "endTime": "2025-10-09T08:59:55Z"}, 2),
        ({"model_group": "other"}, 2),
        ({"completion_tokens": 201}, 2),
    ],
    ids=["same", "model", "cache hit", "time", "other model", "tokens"],
)
def test_call_of_recorded_agent_counts_once(
    ledger: LedgerFile,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    calls: int,
) -> None:
    """Model, tokens and time show it; the gateway does not log the spans of the agent."""
    write(ledger.address, Entry(calls=[LIVE], at=NINE))
    (live,) = ledger.calls()
    imported(tmp_path, changed(1, **{**AT, **changes}))
    assert len(ledger.calls()) == calls
    assert len(ledger.invocations()) == calls
    assert ("1 model call was already in the ledger" in capsys.readouterr().out) == (calls == 1)
    assert ledger.calls()[0] == live


@pytest.mark.parametrize(("vendor", "calls"), [("openai", 2), ("litellm_proxy", 1)])
def test_call_at_the_address_of_a_vendor_is_not_of_the_gateway(
    ledger: LedgerFile, tmp_path: Path, vendor: str, calls: int
) -> None:
    """A bill of the gateway does not have it, either."""
    write(ledger.address, Entry(calls=[LIVE], at=NINE))
    with sqlite3.connect(ledger.path) as connection:
        connection.execute(
            "UPDATE otel_limits_model_calls SET price_basis = ?", (json.dumps({"vendor": vendor}),)
        )
    connection.close()
    imported(tmp_path, changed(1, **AT))
    assert len(ledger.calls()) == calls


def test_each_recorded_call_is_one_of_the_log(ledger: LedgerFile, tmp_path: Path) -> None:
    """An agent sends one prompt at a time to a gateway that others use with the same prompt."""
    write(ledger.address, Entry(calls=[LIVE, LIVE], at=NINE))
    rows = [changed(n, **AT, session_id=f"s{n}") for n in range(5)]
    for _ in range(2):
        imported(tmp_path, *rows)
        assert len(ledger.calls()) == 5


def test_rows_that_cannot_be_read_are_reported(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others count."""
    path = tmp_path / "spend.csv"
    text = as_csv(ROW, changed(2, endTime="yesterday"), changed(3, metadata="{"), changed(4))
    path.write_text(text + "chatcmpl-5,acompletion\n", encoding="utf-8")
    assert main(["ledger", "import", str(path)]) == 0
    assert len(ledger.calls()) == 2
    out = capsys.readouterr().out
    assert "Skipped 3 parts that cannot be read:" in out
    assert f"{path}, line 3: 'yesterday' is not a time such as 2026-03-01T12:00:00Z." in out
    assert f"{path}, line 6: It does not have {len(ROW)} fields." in out
