"""No command and no log shows a secret that a server repeats."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from typing import TYPE_CHECKING

import pytest

from otel_limits.cli.doctor import runaway
from otel_limits.core.internal_errors import INTERNAL_ERRORS
from otel_limits.ledger.address import parse
from otel_limits.ledger.database import Database, DatabaseError, reason_of
from otel_limits.quotas.store import StoreError, StorePlace
from otel_limits.runtime.enable import enable_leniently
from tests.echoes import Collector, Page, PostgreSQL, Proxy, Query, Redis, listening
from tests.quotas.fixtures import open_redis
from tests.unit.core.test_secrets import HOSTILE, SECRET, shown

if TYPE_CHECKING:
    import socketserver
    from pathlib import Path


VARIABLES = (
    *("OTEL_LIMITS_LEDGER", "OTEL_LIMITS_QUOTA_STORE", "OTEL_LIMITS_POLICY"),
    *("OTEL_LIMITS_TIME_ZONE", "OTEL_LIMITS_LEDGER_GROUP", "OTEL_LIMITS_AUDIT_KEYS"),
    *("OTEL_LIMITS_PROMETHEUS_HOST", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS"),
)

OPTIONS = (
    ("audit", "reconcile", "--prometheus"),
    ("demo", "--base-url"),
    ("audit", "spend", "--ledger"),
    ("audit", "stops", "--ledger"),
    ("ledger", "prune", "--older-than", "1d", "--ledger"),
    ("ledger", "export", "--format", "csv", "--ledger"),
    ("ledger", "import", "no-such-file", "--ledger"),
    ("run", "--ledger"),
    ("run", "--quota-store"),
    ("run", "--max-turns"),
    ("run", "--prometheus-port"),
    ("run", "--exempt-tools"),
    ("run", "--max-calls-per-tool"),
    (),
    ("audit",),
    ("audit", "spend", "--ledgr"),
    ("audit", "spend", "--since"),
    ("audit", "spend", "--by"),
    ("audit", "spend", "--where"),
    ("autoload", "install"),
    ("autoload", "status"),
    ("autoload", "remove"),
    ("check", "--ledger"),
    ("docs",),
    ("doctor", "--"),
    ("doctor", "--model"),
    ("doctor", "--", "otel-limits", "run", "--ledger"),
    ("ledger", "import"),
    ("ledger", "export", "--format", "csv", "--output"),
    ("quotas", "reset", "team", "--key"),
    ("quotas", "grant", "team"),
    ("kill", "--agent"),
)

COMMANDS = (
    ("check",),
    ("check", "--agent", "research"),
    ("audit", "spend"),
    ("ledger", "export", "--format", "jsonl"),
    ("quotas", "list"),
    ("run", "--", "no-such-program"),
    ("doctor",),
    ("doctor", "--json"),
    ("ledger", "verify"),
    ("audit", "verify"),
    ("autoload", "status"),
    ("demo", "--no-such-option"),
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that takes an address for a file name must not leave it in the repository."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runaway, "examine", lambda *_: [])  # it knows none of the variables


@pytest.mark.parametrize("arguments", OPTIONS, ids=" ".join)
def test_no_command_shows_the_secret_of_an_option(
    capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    """It says what is wrong, without it."""
    end = ("no-such-program",) if arguments[:1] == ("run",) else ()
    for url in HOSTILE:
        said = shown(capfd, *arguments, url, *end)
        assert SECRET not in said, url
        assert "Traceback" not in said, url


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_shows_the_secret_of_a_variable(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """Neither those that read it nor those that show it."""
    for url in HOSTILE:
        for variable in VARIABLES:
            monkeypatch.setenv(variable, url)
        said = shown(capfd, *command)
        assert SECRET not in said, url
        assert "Traceback" not in said, url


@pytest.mark.parametrize("url", HOSTILE)
@pytest.mark.usefixtures("faulty")
def test_no_log_shows_a_secret(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, url: str
) -> None:
    """Where a variable cannot be used, the log says which."""
    caplog.set_level(logging.DEBUG, "otel_limits")
    for variable in (*VARIABLES, "OTEL_LIMITS_MAX_TURNS", "OTEL_LIMITS_METRICS"):
        monkeypatch.setenv(variable, url)
    enable_leniently("instrumentor")
    assert SECRET not in caplog.text


ESCAPED = "hunter2%2F%2B%40%27x"
CUT = "hunter2" + "z" * 400
TOLD = "unknown command|not allowed|no user|cannot.serve|Cluster mode|rejects traces"


@pytest.fixture
def with_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy file that needs a quota store."""
    (tmp_path / "limits.yaml").write_text("quotas: {q: {model_calls: 2, window: hour}}\n")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", "limits.yaml")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")


@pytest.mark.usefixtures("with_quota")
@pytest.mark.parametrize("password", [ESCAPED, CUT], ids=["escaped", "cut"])
@pytest.mark.parametrize(
    ("server", "command", "setting"),
    [
        (Redis, "quotas", "OTEL_LIMITS_QUOTA_STORE=redis://:{}@{}/0"),
        (Redis, "check", "OTEL_LIMITS_QUOTA_STORE=redis://bob:{}@{}/0"),
        (Redis, "quotas", "OTEL_LIMITS_QUOTA_STORE=redis://{1}/0?password={0}"),
        (Redis, "quotas", "OTEL_LIMITS_QUOTA_STORE=redis+cluster://bob:{}@{}"),
        (
            Redis,
            "check",
            "OTEL_LIMITS_QUOTA_STORE=redis+sentinel://{1}/main?sentinel_password={0}",
        ),
        (Proxy, "quotas", "OTEL_LIMITS_QUOTA_STORE=redis://bob:{}@{}/0"),
        (Proxy, "check", "OTEL_LIMITS_QUOTA_STORE=redis+cluster://bob:{}@{}"),
        (Proxy, "doctor", "OTEL_LIMITS_QUOTA_STORE=redis://bob:{}@{}/0"),
        (PostgreSQL, "audit spend", "OTEL_LIMITS_LEDGER=postgresql://bob:{}@{}/ledger"),
        (
            PostgreSQL,
            "ledger reprice",
            "OTEL_LIMITS_LEDGER=postgresql://{1}/ledger?user=bob&password={0}",
        ),
        (PostgreSQL, "doctor", "OTEL_LIMITS_LEDGER=postgresql://bob:{}@{}/ledger"),
        (Collector, "doctor", "OTEL_EXPORTER_OTLP_ENDPOINT=http://bob:{}@{}"),
        (Collector, "doctor", "OTEL_EXPORTER_OTLP_ENDPOINT=http://{1}/?token={0}"),
        (Query, "top --once --prometheus http://bob:{}@{}", ""),
        (Query, "top --once --prometheus http://{1}/?token={0}", ""),
        (Page, "top --once --scrape http://bob:{}@{}", ""),
        (Page, "top --once --scrape http://{1}/?token={0}", ""),
    ],
)
def test_no_command_shows_a_secret_that_a_server_repeats(
    server: type[socketserver.BaseRequestHandler],
    command: str,
    setting: str,
    password: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Such as a Redis without AUTH, which repeats the arguments of unknown commands."""
    with listening(server) as port:
        place = (password, f"127.0.0.1:{port}")
        if setting:
            monkeypatch.setenv(*setting.format(*place).split("=", 1))
        said = shown(capfd, *command.format(*place).split())
    assert re.search(TOLD, said)
    assert "hunter2" not in said
    assert "zzzz" not in said


@pytest.mark.usefixtures("with_quota")
def test_doctor_shows_no_header_that_a_collector_repeats(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Headers are escaped in their variable, and often have a scheme."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization=Bearer%20{ESCAPED},a=b")
    with listening(Collector) as port:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        said = shown(capfd, "doctor")
    assert "rejects traces" in said
    assert "hunter2" not in said


@pytest.mark.parametrize("server", [Redis, Proxy])
@pytest.mark.usefixtures("faulty")
def test_no_log_shows_a_secret_that_a_store_repeats(
    server: type[socketserver.BaseRequestHandler], caplog: pytest.LogCaptureFixture
) -> None:
    """Not even in the traceback that it has at DEBUG."""
    caplog.set_level(logging.DEBUG, "otel_limits")
    with listening(server) as port:
        place = StorePlace(f"redis://bob:{ESCAPED}@127.0.0.1:{port}/0", 2.0)
        store = open_redis(place)
        for act in (store.check, lambda: list(store.subscribe(0.0, threading.Event()))):
            with pytest.raises(StoreError) as raised:
                act()
            INTERNAL_ERRORS.report(f"quotas {act}", raised.value, str(raised.value))
    assert "unknown command" in caplog.text or "not allowed" in caplog.text
    assert "Traceback" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.usefixtures("faulty")
def test_no_log_shows_a_secret_that_a_ledger_repeats(caplog: pytest.LogCaptureFixture) -> None:
    """Not even in the traceback that it has at DEBUG."""
    caplog.set_level(logging.DEBUG, "otel_limits")
    with listening(PostgreSQL) as port:
        url = f"postgresql://bob:{ESCAPED}@127.0.0.1:{port}/ledger"
        with contextlib.closing(Database(parse("ledger", url, None))) as database:
            with pytest.raises(DatabaseError) as raised:
                database.write([])
            INTERNAL_ERRORS.report("ledger", raised.value, reason_of(raised.value))
    assert "Traceback" in caplog.text
    assert "hunter2" not in caplog.text
