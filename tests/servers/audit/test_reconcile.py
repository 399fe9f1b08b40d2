"""The ledger against what a real Prometheus remembers of hours whose truth is known."""

from __future__ import annotations

import http.server
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.cli import main
from tests.dashboards.servers import remembering
from tests.ledger.book import Call, Entry, write
from tests.processes import SOON

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ledger.fixtures import LedgerFile

HOUR = 3600
SINCE = (int(time.time()) // HOUR - 5) * HOUR
"""The beginning of the window: an hour that is over."""
UNTIL = SINCE + HOUR
DAYS_AGO = SINCE - 3 * 24 * HOUR
BEFORE, AFTER = SINCE - 2 * HOUR, UNTIL + 600

WEB = """
basic_auth_users:
  # "test", as in the documentation of Prometheus
  auditor: $2b$12$hNf2lSsxfm0.i4a.1kVpSOVyBCfIB51VRjgBUyv6kdnyTlgWj81Ay
"""
AUTHORIZATION = "Basic YXVkaXRvcjp0ZXN0"  # auditor:test


@dataclass(frozen=True)
class Process:
    """One scraped process, which is a separate agent."""

    agent: str
    calls: dict[int, float]
    """Times of scrapes that found it, with what it had counted."""
    started: Mapping[int, float] | float | None = None
    """Its start time, or the time of the scrape if it exports none."""
    alive: tuple[int, ...] = ()
    """Further scrapes, which found no call of this agent yet."""


def every_minute(begin: int, end: int, value: Callable[[int], float]) -> dict[int, float]:
    """Scrapes at each full minute and half a minute around it."""
    return {at: value(at) for at in range(begin + 30, end, 60)}


def rising(begin: int, end: int, first: float = 0) -> dict[int, float]:
    """One call between each two scrapes."""
    return every_minute(begin, end, lambda at: first + (at - begin) // 60)


PROCESSES = (
    Process("steady", rising(BEFORE, AFTER, 1000), BEFORE),
    # 300 until two hours before; after the gap 400, then one call a minute
    Process(
        "gap before",
        {BEFORE: 300, **rising(SINCE + 600, AFTER, 400)},
        BEFORE - HOUR,
    ),
    Process("long gap before", {DAYS_AGO: 300, **rising(SINCE + 600, AFTER, 400)}, DAYS_AGO - 1),
    Process("whole life", rising(SINCE + 600, AFTER, 1000)),
    Process(
        "restarted",
        rising(BEFORE, SINCE + 1800, 500) | rising(SINCE + 1800, AFTER),
        dict.fromkeys(every_minute(BEFORE, SINCE + 1800, float), BEFORE)
        | dict.fromkeys(every_minute(SINCE + 1800, AFTER, float), SINCE + 1800),
    ),
    Process(
        "overtook itself",
        {SINCE - 30: 5, SINCE + 30: 5, SINCE + 2000: 50, SINCE + 2060: 50, AFTER: 50},
        {SINCE - 30: BEFORE, SINCE + 30: BEFORE, SINCE + 2000: SINCE + 900, AFTER: SINCE + 900},
    ),
    Process("born", rising(SINCE + 600, AFTER, 7), SINCE + 590.0),
    Process(
        "first call",
        rising(SINCE + 600, AFTER, 7),
        BEFORE,
        alive=tuple(every_minute(BEFORE, SINCE + 600, float)),
    ),
    Process("scrape gap", rising(BEFORE, SINCE + 600) | rising(SINCE + 2400, AFTER, 160), BEFORE),
    Process("dark gap", rising(BEFORE, SINCE + 600) | rising(SINCE + 2400, AFTER, 160)),
    Process("over", rising(BEFORE, SINCE + 1800), BEFORE),
    Process("alive", rising(BEFORE, UNTIL), BEFORE),
)

TRUE = {  # agent: what Prometheus proves, and what it permits
    "steady": (59, 61),
    "gap before": (49, 49 + 100 + 1),  # and not its whole life
    "long gap before": (49, 49 + 100 + 1),
    "whole life": (49, 1000 + 49 + 1),  # its start time is unknown
    "restarted": (58, 60),
    "overtook itself": (50, 50),
    "born": (7 + 49, 7 + 49 + 1),
    "first call": (7 + 49, 7 + 49 + 1),
    "scrape gap": (59, 61),
    "dark gap": (59, 9 + 160 + 19 + 2),  # it may have begun again behind the gap
    "over": (29, 30),
    "alive": (59, 60),
}


def samples() -> str:
    """Everything that was scraped, in the format OpenMetrics."""
    calls, life, starts, cost, tokens, stops = [], [], [], [], [], []
    for number, process in enumerate(PROCESSES):
        job = "over" if process.agent == "over" else "agents"
        place = f'job="{job}",instance="10.0.0.{number}:9464"'
        names = f'agent="{process.agent}",model="m",kind="measured",{place}'
        for at, value in process.calls.items():
            calls.append(f"otel_limits_model_calls_total{{{names}}} {value} {at}")
            if process.agent == "steady":
                model = f'agent="steady",model="m",{place}'
                ended = f'agent="steady",reason="end_turn",action="none",{place}'
                cost.append(f"otel_limits_cost_usd_total{{{model}}} {value * 0.1} {at}")
                stops.append(f"otel_limits_stops_total{{{ended}}} {value} {at}")
                tokens += [
                    f'otel_limits_tokens_total{{{model},type="{kind}"}} {value * size} {at}'
                    for kind, size in (("input", 100), ("output", 20))
                ]
        scrapes = sorted({*process.calls, *process.alive})
        life += [f'otel_limits_build_info{{version="1",{place}}} 1 {at}' for at in scrapes]
        started = process.started
        if isinstance(started, int | float):
            started = dict.fromkeys(scrapes, started)
        for at, value in (started or {}).items():
            starts.append(f"process_start_time_seconds{{{place}}} {value} {at}")
    families = {
        "otel_limits_model_calls counter": calls,
        "otel_limits_cost_usd counter": cost,
        "otel_limits_stops counter": stops,
        "otel_limits_tokens counter": tokens,
        "otel_limits_build_info gauge": life,
        "process_start_time_seconds gauge": starts,
    }
    lines = (line for name, found in families.items() for line in (f"# TYPE {name}", *found))
    return "\n".join((*lines, "# EOF", ""))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that requires credentials."""
    directory = tmp_path_factory.mktemp("prometheus")
    with remembering(directory, samples(), WEB, AUTHORIZATION) as url:
        yield url


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The credentials."""
    monkeypatch.setenv("OTEL_LIMITS_PROMETHEUS_AUTHORIZATION", AUTHORIZATION)


Ask = Callable[..., Any]


def ask(capsys: pytest.CaptureFixture[str], url: str, *more: str) -> tuple[int, Any]:
    """Ask about the window."""
    window = ("--since", iso(SINCE), "--until", iso(UNTIL))
    status = main(["audit", "reconcile", "--prometheus", url, *window, *more, "--format", "json"])
    said = capsys.readouterr()
    return status, json.loads(said.out) if said.out else said.err


def iso(seconds: int) -> str:
    """A time as an auditor writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def entry(agent: str, calls: int) -> Entry:
    """An invocation within the window."""
    return Entry(agent=agent, calls=[Call()] * calls, at=SINCE + 700.0)


@pytest.mark.usefixtures("known")
def test_proven_and_possible_increases(
    url: str, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Restarts, gaps and births: the range holds the truth, and not more than it must."""
    write(ledger.address, *(entry(agent, 1) for agent in TRUE))
    _, answer = ask(capsys, url)
    assert {
        row["agent"]: (row["prometheus"], row["prometheus_most"])
        for row in answer["reconcile"]
        if row["measure"] == "model calls"
    } == TRUE


@pytest.mark.usefixtures("known")
def test_only_the_processes_of_a_job_are_compared(
    url: str, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Prometheus may have several fleets, and a ledger that of one."""
    write(ledger.address, entry("over", 30))
    status, answer = ask(capsys, url, "--job", "over")
    assert (status, [row["agent"] for row in answer["reconcile"]]) == (1, ["over"] * 3)
    assert verdicts(answer, "over")["model calls"] == (0, "yes")
    status, error = ask(capsys, url, "--job", "over", "nightly")
    assert status == 2
    assert "has no metrics of job nightly between 20" in error


def steady(invocations: int) -> list[Entry]:
    """As many invocations as an agent had, one call each."""
    return [
        Entry(agent="steady", calls=[Call(price="0.1")], at=SINCE + 30.0 + 50 * n)
        for n in range(invocations)
    ]


def verdicts(answer: Any, agent: str) -> dict[str, tuple[Any, str]]:
    """Differences of an agent, and whether they are accepted, by what is counted."""
    rows = {row["measure"]: row for row in answer["reconcile"] if row["agent"] == agent}
    rows |= {
        name: row for name in ("cost", "stops") for row in answer[name] if row["agent"] == agent
    }
    return {name: (Decimal(row["difference"]), row["accepted"]) for name, row in rows.items()}


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("calls", [59, 60, 61])
def test_increase_within_the_possible_range_is_not_a_difference(
    url: str, ledger: LedgerFile, capsys: pytest.CaptureFixture[str], calls: int
) -> None:
    """Calls, tokens, money and stops agree exactly, although the window cuts through intervals."""
    write(ledger.address, *steady(calls))
    _, answer = ask(capsys, url, "--tolerance", "0")
    assert verdicts(answer, "steady") == {
        "model calls": (0, "yes"),
        "input tokens": (0, "yes"),
        "output tokens": (0, "yes"),
        "cost": (0, "yes"),
        "stops": (0, "yes"),
    }


@pytest.mark.usefixtures("known")
def test_increase_outside_the_possible_range_is_a_difference(
    url: str, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counted from the nearest end of the range, in the unit of each."""
    write(ledger.address, *steady(70), entry("gap before", 160), entry("dark gap", 100))
    status, answer = ask(capsys, url)
    assert status == 1
    assert verdicts(answer, "steady") == {
        "model calls": (-9, "no"),
        "input tokens": (-900, "no"),
        "output tokens": (-180, "no"),
        "cost": (Decimal("-0.9"), "no"),
        "stops": (-9, "no"),
    }
    assert verdicts(answer, "gap before")["model calls"] == (-10, "no")
    assert verdicts(answer, "dark gap")["model calls"] == (0, "yes")
    assert verdicts(answer, "over")["model calls"] == (29, "no")  # the ledger has none


@pytest.mark.usefixtures("known")
def test_unscraped_increase_is_not_a_difference(
    url: str, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """A live process has counted it, and will be scraped a moment later."""
    just_now = Entry(agent="alive", calls=[Call()] * 9, at=UNTIL - 10.0)
    write(ledger.address, entry("alive", 60), just_now)
    assert verdicts(ask(capsys, url, "--tolerance", "0")[1], "alive")["model calls"] == (0, "yes")
    write(ledger.address, entry("alive", 1), first=9)
    assert verdicts(ask(capsys, url, "--tolerance", "0")[1], "alive")["model calls"] == (-1, "no")


@pytest.mark.usefixtures("known")
def test_imported_and_repriced_calls_compare_as_counted(
    url: str, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """No process counted what was imported, and none knew a later price."""
    write(ledger.address, *steady(60))
    with closing(sqlite3.connect(ledger.path)) as connection:
        connection.execute(
            "UPDATE otel_limits_model_calls SET former_price_pico = price_pico, "
            "former_price_source = price_source, price_pico = price_pico * 2"
        )
        connection.execute(
            "INSERT INTO otel_limits_model_calls (at_us, trace_id, span_id, invocation_id, agent, "
            "model, provider, input_tokens, output_tokens, cache_read_tokens, cache_write_tokens, "
            "state, estimated, source) VALUES (?, 't', 's', 'i', 'steady', 'm', "
            "'p', 900, 900, 0, 0, 'measured', 0, 'import')",
            ((SINCE + 9) * 1_000_000,),
        )
        connection.commit()
    _, answer = ask(capsys, url, "--tolerance", "0")
    assert {verdict for _, verdict in verdicts(answer, "steady").values()} == {"yes"}


# --- credentials ----------------------------------------------------------------------------------


def test_a_prometheus_that_asks_who_is_there(
    url: str, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without credentials the refusal is a sentence, and nothing has been compared."""
    write(ledger.address, *steady(1))
    status, said = ask(capsys, url)
    assert status == 2
    assert "rejected a query: status 401. Set OTEL_LIMITS_PROMETHEUS_AUTHORIZATION" in said


def test_credentials_from_a_file(
    url: str,
    ledger: LedgerFile,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They come before those of the environment; that others can read the file is said."""
    monkeypatch.setenv("OTEL_LIMITS_PROMETHEUS_AUTHORIZATION", "Basic d3Jvbmc6d3Jvbmc=")
    write(ledger.address, *steady(60))
    file = tmp_path / "who"
    file.write_text(f"{AUTHORIZATION}\n", encoding="utf-8")
    file.chmod(0o600)
    with caplog.at_level(logging.WARNING, "otel_limits"):
        _, answer = ask(capsys, url, "--authorization-file", str(file))
        assert caplog.messages == []
        file.chmod(0o640)
        ask(capsys, url, "--authorization-file", str(file))
    assert verdicts(answer, "steady")["model calls"] == (0, "yes")
    assert caplog.messages == [f"otel-limits: other users can read {file}. Run: chmod 600 {file}"]


SECRETS = ("s3cret", "Bearer s3cret\r\nHost: elsewhere", "Bearer s3cr\u00e9t", "Bearer")


@pytest.mark.parametrize("text", SECRETS)
def test_invalid_credentials_are_rejected_and_not_shown(
    ledger: LedgerFile,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
) -> None:
    """A token without its scheme, a second header, what no header can have: a sentence each."""
    write(ledger.address, *steady(1))
    monkeypatch.setenv("OTEL_LIMITS_PROMETHEUS_AUTHORIZATION", text)
    status, said = ask(capsys, "http://127.0.0.1:1")
    assert status == 2
    assert "OTEL_LIMITS_PROMETHEUS_AUTHORIZATION must be" in said
    assert "s3cr" not in said
    file = tmp_path / "who"
    file.write_text(text, encoding="utf-8")
    file.chmod(0o600)
    with pytest.raises(SystemExit, match="2"):
        ask(capsys, "http://127.0.0.1:1", "--authorization-file", str(file))
    assert "s3cr" not in capsys.readouterr().err
    monkeypatch.setenv("OTEL_LIMITS_PROMETHEUS_AUTHORIZATION", "Bearer s3cret")
    assert main(["check"]) == 0
    assert "s3cr" not in capsys.readouterr().out


@contextmanager
def asked_by(answer: Callable[[str], int]) -> Iterator[tuple[int, list[tuple[str, str | None]]]]:
    """Listen at a port, answer a host with a status, and note who says who they are."""
    seen: list[tuple[str, str | None]] = []

    class Listener(http.server.BaseHTTPRequestHandler):
        """Sends on to the other name of the same machine, or refuses."""

        def do_GET(self) -> None:
            """Answer."""
            host = self.headers["Host"].partition(":")[0]
            seen.append((host, self.headers["Authorization"]))
            self.send_response(answer(host))
            self.send_header("Location", f"http://localhost:{self.server.server_port}/")  # type: ignore[attr-defined]
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Listener) as server:
        thread = threading.Thread(target=server.serve_forever, args=(SOON,))
        thread.start()
        try:
            yield server.server_port, seen
        finally:
            server.shutdown()
            thread.join()


def test_credentials_do_not_follow_to_another_place(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials are not sent to a redirect's target."""
    write(ledger.address, *steady(1))
    monkeypatch.setenv("OTEL_LIMITS_PROMETHEUS_AUTHORIZATION", AUTHORIZATION)
    with asked_by(lambda host: 302 if host.startswith("127") else 404) as (port, seen):
        assert ask(capsys, f"http://127.0.0.1:{port}")[0] == 2
    assert seen == [("127.0.0.1", AUTHORIZATION), ("localhost", None)]


# --- verify ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("known")
def test_verify_compares_the_metrics_too(
    url: str, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ledger that agrees with itself and not with the metrics is status 1; each is named."""
    write(ledger.address, *steady(60))
    assert main(["audit", "verify", "--prometheus", url, "--format", "json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    (check,) = (each for each in answer["verify"] if "Prometheus" in each["check"])
    assert check["state"] == "FAILED"
    assert check["found"] == len(answer["rows"])
    assert {
        "trouble": "metrics differ",
        "invocation_id": "steady, end_turn",
        "rows": "stops: 60 in the ledger, 1189 to 1189 in Prometheus",
        "command": f"otel-limits audit reconcile --prometheus {url} --ledger {ledger.address}",
    } in answer["rows"]
    assert main(["audit", "verify"]) == 0
