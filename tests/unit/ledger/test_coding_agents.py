"""Logs of coding agents: model calls that have no span."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.cli import main
from tests.price_list import listed

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ledger.fixtures import LedgerFile

# Claude Code writes counts as text, and Codex some of them.
CLAUDE: dict[str, Any] = {
    "event.name": "api_request",
    "event.timestamp": "2026-03-01T12:00:05.250Z",
    "session.id": "11d4",
    "user.email": "joe@example.com",
    "model": "claude-sonnet-4-5-20250929",
    "cost_usd": "0.0123",
    "duration_ms": "1250",
    "input_tokens": "10",
    "output_tokens": "200",
    "cache_read_tokens": "3000",
    "cache_creation_tokens": "400",
    "request_id": "req_011",
    "speed": "normal",
}
CODEX: dict[str, Any] = {
    "event.name": "codex.sse_event",
    "event.kind": "response.completed",
    "event.timestamp": "2026-03-01T12:00:05.250Z",
    "conversation.id": "0199",
    "user.email": "joe@example.com",
    "model": "gpt-5",
    "input_token_count": "3400",
    "output_token_count": "200",
    "cached_token_count": 3000,
    "reasoning_token_count": 150,
    "tool_token_count": "3600",
}
GEMINI: dict[str, Any] = {
    "event.name": "gemini_cli.api_response",
    "event.timestamp": "2026-03-01T12:00:05.250Z",
    "session.id": "33f6",
    "user.email": "joe@example.com",
    "model": "gemini-2.5-pro",
    "duration_ms": 1250,
    "input_token_count": 3390,
    "output_token_count": 50,
    "cached_content_token_count": 3000,
    "thoughts_token_count": 150,
    "tool_token_count": 10,
    "total_token_count": 3600,
    "prompt_id": "7",
}
BODIES = {"api_request": "claude_code.api_request"}


def record(said: dict[str, Any], **changes: object) -> dict[str, Any]:
    """A log record as OTLP has it."""
    said = {key: value for key, value in {**said, **changes}.items() if value is not None}
    return {
        "timeUnixNano": "1772366405250000000",
        "body": {"stringValue": BODIES.get(said["event.name"], "")},
        "attributes": [
            {"key": key, "value": {"stringValue" if isinstance(value, str) else "intValue": value}}
            for key, value in said.items()
        ],
    }


def imported(tmp_path: Path, *records: dict[str, Any]) -> None:
    """Import log records, one on each line."""
    path = tmp_path / "logs.jsonl"
    lines = [json.dumps({"resourceLogs": [{"scopeLogs": [{"logRecords": [r]}]}]}) for r in records]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert main(["ledger", "import", str(path)]) == 0


NAMES = ("agent", "model", "provider", "state", "input_tokens", "output_tokens")


@listed
@pytest.mark.parametrize(
    ("said", "right"),
    [
        (CLAUDE, ("claude-code", "claude-sonnet-4-5-20250929", "anthropic", "measured", 3410, 200)),
        (CODEX, ("codex", "gpt-5", "openai", "measured", 3400, 200)),
        (GEMINI, ("gemini-cli", "gemini-2.5-pro", "gcp.gemini", "measured", 3400, 200)),
    ],
    ids=["Claude Code", "Codex", "Gemini CLI"],
)
def test_call_in_log_counts_once(
    ledger: LedgerFile, tmp_path: Path, said: dict[str, Any], right: tuple[object, ...]
) -> None:
    """Input includes cached input, whichever way the program counts it."""
    for _ in range(2):
        imported(tmp_path, record(said))
    (call,) = ledger.calls()
    assert tuple(call[name] for name in NAMES) == right
    assert call["cache_read_tokens"] == 3000
    assert call["cache_write_tokens"] == (400 if said is CLAUDE else 0)
    # Per million tokens, 3 / 0.30 / 3.75 / 15 USD for Claude Sonnet 4.5, and 1.25 / 0.125 / 10 USD
    # for GPT-5 and Gemini 2.5 Pro.
    assert call["price_pico"] == (5_430_000_000 if said is CLAUDE else 2_875_000_000)
    assert main(["audit", "verify"]) == 0


@pytest.mark.parametrize(
    "said", [CLAUDE, CODEX, GEMINI], ids=["Claude Code", "Codex", "Gemini CLI"]
)
def test_session_is_one_invocation(
    ledger: LedgerFile, tmp_path: Path, said: dict[str, Any]
) -> None:
    """It lasts from its first request to its last answer, and a further session is another one."""
    later = {"event.timestamp": "2026-03-01T12:09:00Z", "request_id": "req_012"}
    other = {"session.id": "22e5", "conversation.id": "0200", "request_id": "req_013"}
    imported(tmp_path, record(said), record(said, **later), record(said, **other))
    first, second = sorted(ledger.invocations(), key=lambda row: -int(row["model_calls"]))
    assert (first["model_calls"], second["model_calls"]) == (2, 1)
    assert first["session_id"] == said.get("session.id", said.get("conversation.id"))
    duration = 8 * 60 + 54.75 + (0 if said is CODEX else 1.25)
    assert (first["ended_us"] - first["started_us"]) / 1_000_000 == duration


def test_calls_of_one_moment_are_apart(ledger: LedgerFile, tmp_path: Path) -> None:
    """Claude Code's have an ID, and Codex makes one call of a conversation at a time."""
    imported(tmp_path, record(CLAUDE), record(CLAUDE, request_id="req_012"))
    imported(tmp_path, record(CODEX), record(CODEX, **{"conversation.id": "0200"}))
    assert len(ledger.calls()) == 4


def test_call_without_request_id_is_identified_by_its_time(
    ledger: LedgerFile, tmp_path: Path
) -> None:
    """A gateway may remove it."""
    later = {"event.timestamp": "2026-03-01T12:09:00Z"}
    for _ in range(2):
        imported(
            tmp_path,
            record(CLAUDE, request_id=None),
            record(CLAUDE, request_id=None, **later),
        )
    assert len(ledger.calls()) == 2


@pytest.mark.parametrize("keys", ["", "user.email"])
def test_user_is_stored_if_asked_for(
    ledger: LedgerFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: str
) -> None:
    """Both programs write who uses them into every record."""
    monkeypatch.setenv("OTEL_LIMITS_AUDIT_KEYS", keys)
    imported(tmp_path, record(CLAUDE), record(CODEX))
    assert list(ledger.attributes().values()) == (["joe@example.com"] * 2 if keys else [])


OTHERS = {
    "a prompt": record(CLAUDE, **{"event.name": "api_request", "input_tokens": None})
    | {"body": {"stringValue": "claude_code.user_prompt"}},
    "another event of a stream": record(CODEX, **{"event.kind": "response.created"}),
    "another program": record(CLAUDE) | {"body": {"stringValue": "acme.api_request"}},
    "an error": record(CODEX, input_token_count=None, output_token_count=None,
                       cached_token_count=None),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_other_records_are_no_calls(
    ledger: LedgerFile, tmp_path: Path, other: dict[str, Any]
) -> None:
    """They are read, and nothing of them is kept."""
    imported(tmp_path, record(CLAUDE), other)
    assert len(ledger.calls()) == 1


@pytest.mark.parametrize("count", ["many", "-5", "1.5", ""])
def test_count_that_is_none_is_not_measured(ledger: LedgerFile, tmp_path: Path, count: str) -> None:
    """The call is there, and its tokens are unknown."""
    imported(tmp_path, record(CLAUDE, input_tokens=count))
    (call,) = ledger.calls()
    assert call["state"] != "measured"
    assert call["output_tokens"] == 200


@pytest.mark.parametrize("commands", ["both", "span log span log", "log span log span"])
def test_call_in_log_and_span_counts_once(
    ledger: LedgerFile, tmp_path: Path, commands: str
) -> None:
    """Claude Code can export both, in different traces, to the same file or to two."""
    attributes = [
        {"key": key, "value": {"stringValue" if isinstance(value, str) else "intValue": value}}
        for key, value in CLAUDE.items()
    ]
    span = {
        "traceId": "1" * 32,
        "spanId": "2" * 16,
        "name": "claude_code.llm_request",
        "startTimeUnixNano": "1772366404000000000",
        "endTimeUnixNano": "1772366405250000000",
        "attributes": [
            *attributes,
            {"key": "gen_ai.request.model", "value": {"stringValue": CLAUDE["model"]}},
        ],
    }
    scope = {"scope": {"name": "com.anthropic.claude_code.tracing"}, "spans": [span]}
    in_span = {"resourceSpans": [{"scopeSpans": [scope]}]}
    in_log = {"resourceLogs": [{"scopeLogs": [{"logRecords": [record(CLAUDE)]}]}]}
    files = {"span": in_span, "log": in_log, "both": {**in_span, **in_log}}
    for name in commands.split():
        path = tmp_path / name
        path.write_text(json.dumps(files[name]), encoding="utf-8")
        assert main(["ledger", "import", str(path)]) == 0
    (call,) = ledger.calls()
    assert (call["input_tokens"], call["cache_read_tokens"]) == (3410, 3000)
    # The next call of the session is another one.
    imported(tmp_path, record(CLAUDE, request_id="req_012", output_tokens="201"))
    assert len(ledger.calls()) == 2
    assert main(["audit", "verify"]) == 0


def test_printed_log_record_is_a_call(ledger: LedgerFile, tmp_path: Path) -> None:
    """Gemini CLI writes its log records to a file as JavaScript prints them."""
    path = tmp_path / "telemetry.log"
    other = {"attributes": {"event.name": "gemini_cli.config", "session.id": "33f6"}}
    path.write_text("".join(json.dumps(each, indent=2) for each in (other, {"attributes": GEMINI})))
    assert main(["ledger", "import", str(path)]) == 0
    (call,) = ledger.calls()
    assert (call["agent"], call["input_tokens"], call["output_tokens"]) == ("gemini-cli", 3400, 200)
