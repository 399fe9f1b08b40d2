"""Which texts of tools are failures, and which parts of a text are no progress."""

from __future__ import annotations

import pytest

from otel_limits.core.failures import first_line, is_failure, without_moving_parts

FAILURES = (
    "error: Permission denied (publickey)",
    "ERROR boom",
    "Error executing tool search",
    " **Error**: no such file",
    "<error>bad</error>",
    "ValueError: 3",
    "requests.exceptions.HTTPError: 500",
    "Exception: down",
    "Traceback (most recent call last):\n  File x",
    "Failed to connect",
    "denied by the policy",
    "Permission denied",
    "HTTP 404",
    "HTTP/1.1 503 Service Unavailable",
    "status: 500",
    "status code 429",
    '{"error": "no such file"}',
    '{"status": 502, "body": ""}',
    '{"success": false, "message": "quota exceeded"}',
    "{'ok': False, 'reason': 'busy'}",
    '{"isError": true, "content": []}',
    '{"is_error": true}',
    "error: no network",
    "[2026-11-28T10:01:07Z] attempt 1: error: no route",
    "2026-11-28 10:01:07,123 - ERROR - boom",
    "Sat, 28 Nov 2026 10:00:00 GMT error: down",
    "10:01:07 Attempt 3 of 5 failed",
    '{"type": "text", "text": "Error executing tool search"}',
    '[{"type":"text","text":"Error: down"},{"type":"text","text":"more"}]',
    "[{'text': 'ValueError: 3', 'type': 'text'}]",
    '{"data": null, "success": false}',
    '{"content": [{"type": "text", "text": "down"}], "isError": true}',
    '{"status": "error", "message": "down"}',
    "Error code: 500",
    "Error 404: no such page",
    "error: 13",
    "Failed with exit code: 1",
    "Failed to connect: 10060",
    "Error in line: 12",
    "Error executing tool search: 1 validation error for Arguments",
    "Error calling service: 2",
    "Error response: 503",
    "Failed login: 401 Unauthorized",
    "Failed: 3 attempts were not enough",
    "status: 404, not found",
)

SUCCESSES = (
    "",
    "found 3 errors in the report",
    "13 tests failed",
    "errors are the answer",
    "Error-free since Monday",
    '{"error": null, "data": 1}',
    '{"error": "", "data": 1}',
    "Failed: 0, passed: 12",
    "error: none",
    '{"success": true, "error": null}',
    '{"ok": 1}',
    '{"isError": false}',
    '{"lastError": null, "rows": 3}',
    "ok: falsehoods are rare",
    "no error",
    "error_rate 0.3",
    "status: 200",
    "status: 4000",
    "HTTP 200",
    "ok, status 500",
    "terror: a film",
    "Failed tests: 13",
    "Failed tests: 12\nfirst: test_a",
    "Failed checks: 1 of 9",
    "Failed login attempts today: 3",
    '{"failed": 3, "passed": 9}',
    "Denied: 5, allowed: 7",
    "Error rate: 0.5%",
    "Error count: 0",
    "failed jobs: none",
    "status: 450 of 900",
    "status: 450/900",
    "Status 45.5",
    "status 412.5 ms",
    '{"rows": [{"name": "a", "ok": false}]}',
    '{"success": 0}',
    '{"type": "text", "text": "no error"}',
    '{"status": "errors are counted"}',
    "{" + '"a": {' * 20_000,
)


@pytest.mark.parametrize("text", FAILURES)
def test_text_that_begins_like_a_failure_is_one(text: str) -> None:
    """Also after time stamps, attempts and brackets."""
    assert is_failure(text)


@pytest.mark.parametrize("text", SUCCESSES)
def test_other_text_is_no_failure(text: str) -> None:
    """A report about errors is an answer."""
    assert not is_failure(text)


SAME = (
    ("at 10:00:07 nothing", "at 10:09:59 nothing"),
    ("[2026-11-28T10:01:07Z] empty", "[2026-11-29T23:59:59.123+01:00] empty"),
    ("Nov 28 10:00:00 empty", "Nov  9 10:00:01 empty"),
    ("empty after 12 ms", "empty after 1.5s"),
    ("empty (3 minutes)", "empty (4 minutes)"),
    (
        "request 550e8400-e29b-41d4-a716-446655440000",
        "request 00000000-e29b-41d4-a716-446655440000",
    ),
    ("trace 0123456789abcdef", "trace fedcba98765432100"),
    ("down (req_011CSHoEeqs5C35K2UUqR7Fy)", "down (req_9f86d081884c7d659a2feaa0c55ad015)"),
    ("attempt 1: empty", "Attempt 12 of 20: empty"),
)

OTHER = (
    ("3 of 12 done", "4 of 12 done"),
    ("page 4", "page 5"),
    ("9 tests failed", "8 tests failed"),
    ("accuracy 0.51", "accuracy 0.52"),
    ("next 00001eef", "next 00003dde"),
    ("12 meters", "13 meters"),
    ("version 1.2.3", "version 1.2.4"),
)


@pytest.mark.parametrize(("one", "two"), SAME)
def test_moving_parts_are_no_progress(one: str, two: str) -> None:
    """Time passes, and IDs differ, although nothing happens."""
    assert without_moving_parts(one).casefold() == without_moving_parts(two).casefold()


@pytest.mark.parametrize(("one", "two"), OTHER)
def test_other_numbers_are_progress(one: str, two: str) -> None:
    """They count something."""
    assert without_moving_parts(one) != without_moving_parts(two)


def test_first_line_has_no_credentials() -> None:
    """The operator reads it, also in the log."""
    assert first_line("\n  error: https://me:secret@host/x down\nmore") == (
        "error: https://me:***@host/x down"
    )
