"""`otel-limits top` as it is typed: addresses, `--once`, JSON, and refusals."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.cli import main
from otel_limits.cli.parser import make_parser
from otel_limits.cli.top.top_command import feeds_of
from tests.processes import free_port
from tests.servers.top.test_scrapes import answering
from tests.top.pages import page

if TYPE_CHECKING:
    from collections.abc import Callable

Run = Any
FLEET = page(
    """
    invocations_in_progress{agent="researcher"} 2
    turns_total{agent="researcher"} 14
    invocation_turns_sum{agent="researcher"} 0
    limit{agent="researcher",limit="max_turns"} 10
    cost_usd_total{agent="researcher",model="m"} 1.5
    quota_used{quota="daily",key="(all)"} 95
    quota_reserved{quota="daily",key="(all)"} 0
    quota_limit{quota="daily",key="(all)"} 100
    quota_resets_timestamp_seconds{quota="daily",key="(all)"} 4102444800
    """
)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Type the command: its exit status and what it prints."""

    def type_in(*arguments: str) -> tuple[int, str, str]:
        status = main(["top", *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return type_in


@pytest.fixture
def once(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Query a fleet once, without the wait between the two scrapes that a rate needs."""
    monkeypatch.setattr(time, "sleep", lambda _: None)

    def ask(*more: str) -> dict[str, Any]:
        with answering(FLEET) as (place, _):
            status, out, _ = run("--once", "--json", "--scrape", place, *more)
        assert status == 0
        answer: dict[str, Any] = json.loads(out)
        return answer

    return ask


def test_a_script_is_given_json(run: Run) -> None:
    """With the rates of five seconds: what ships is waited for."""
    with answering(FLEET) as (place, asked):
        status, out, err = run("--once", "--json", "--scrape", place)
    answer = json.loads(out)
    assert (status, err) == (0, "")
    assert len(asked) == 2
    assert answer["schema"] == "otel-limits/top/1"
    assert answer["feeds"] == [{"address": f"http://{place}/metrics", "error": None}]
    assert 5 <= answer["rates_over_seconds"] < 60
    assert answer["totals"] == {
        "agents": 1,
        "in_progress": 2,
        "halts": 0,
        "refusals": 0,
        "errors": 0,
        "turns_per_minute": 0,
        "tokens_per_minute": 0,
        "usd_per_hour": 0,
        "unpriced_tokens_per_minute": 0,
    }
    (row,) = answer["agents"]
    assert row["agent"] == "researcher"
    assert row["now"] == [{"limit": "max_turns", "cap": 10, "share": pytest.approx(0.7)}]
    (quota,) = answer["quotas_near_limit"]
    assert (quota["quota"], quota["share"]) == ("daily", 0.95)
    assert quota["resets"] == "2100-01-01T00:00:00Z"
    assert answer["last_halts"] == []


def test_unknown_values_are_null(once: Callable[..., dict[str, Any]]) -> None:
    """A rate needs time between two scrapes."""
    answer = once()
    assert answer["rates_over_seconds"] is None
    assert answer["agents"][0]["usd_per_hour"] is None


def test_one_of_two_addresses_is_enough(once: Callable[..., dict[str, Any]]) -> None:
    """The error of the other one is a sentence."""
    answer = once(f"127.0.0.1:{free_port()}")
    assert [feed["error"] is None for feed in answer["feeds"]] == [True, False]
    assert "is unavailable" in answer["feeds"][1]["error"]


def test_an_address_given_twice_is_one(once: Callable[..., dict[str, Any]]) -> None:
    """Its agents do not count twice."""
    assert len(once(f"127.0.0.1:{free_port()}", "a", "a")["feeds"]) == 3


def test_a_person_is_given_a_table(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any escape sequence where it goes to a file."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with answering(FLEET) as (place, _):
        status, out, _ = run("--once", "--scrape", place)
    assert status == 0
    assert re.search(r"^researcher +2 .*max_turns ████████▍░░░  70%", out, re.MULTILINE)
    assert "Quotas close to their limit" in out
    assert "\x1b" not in out


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_addresses_without_an_answer_exit_with_1(run: Run, more: tuple[str, ...]) -> None:
    """Scripts need exit status 1 immediately, and people the reason."""
    status, out, _ = run("--once", *more, "--scrape", f"127.0.0.1:{free_port()}")
    assert status == 1
    assert "is unavailable (Connection refused)" in out


def test_unreachable_prometheus_is_reported_without_password(run: Run) -> None:
    """The message omits its password."""
    url = f"http://me:s3cret@127.0.0.1:{free_port()}"
    status, out, _ = run("--once", "--prometheus", url)
    assert status == 1
    assert "did not return a Prometheus response (" in out
    assert "s3cret" not in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--json",), "--json requires --once. Run: otel-limits top --once --json"),
        ((), "The live view requires a terminal. Run: otel-limits top --once"),
        (("--scrape", "ftp://h"), "Invalid endpoint 'ftp://h'."),
    ],
)
def test_invalid_arguments_are_rejected(run: Run, arguments: tuple[str, ...], said: str) -> None:
    """Exit status 2, and the fix."""
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert said in err


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        ({}, "http://127.0.0.1:9464/metrics"),
        ({"PORT": "9999"}, "http://127.0.0.1:9999/metrics"),
        ({"PORT": "9999", "HOST": "0.0.0.0"}, "http://127.0.0.1:9999/metrics"),  # noqa: S104
        ({"PORT": "9999", "HOST": "10.0.0.7"}, "http://10.0.0.7:9999/metrics"),
        ({"PORT": "9999", "HOST": "::1"}, "http://[::1]:9999/metrics"),
    ],
)
def test_the_local_port_is_read_by_default(
    variables: dict[str, str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the settings, otherwise the usual one."""
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_LIMITS_PROMETHEUS_{name}", value)
    (feed,) = feeds_of(make_parser().parse_args(["top"]))
    assert feed.shown == address
