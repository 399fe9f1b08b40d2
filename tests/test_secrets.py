"""No command shows a secret, however the address is written that has it, or ends in a traceback."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_limits.cli import main
from otel_limits.cli.doctor import runaway
from otel_limits.cli.doctor.doctor_command import run_options
from otel_limits.cli.doctor.launcher import UnknownLauncherError, read_launcher
from otel_limits.core.internal_errors import INTERNAL_ERRORS
from otel_limits.core.secrets import redact_secrets, redact_url, secrets_in
from otel_limits.ledger.address import parse
from otel_limits.ledger.database import Database, DatabaseError, reason_of
from otel_limits.quotas.store import StoreError, StorePlace
from otel_limits.quotas.stores import open_shared_store
from otel_limits.runtime.enable import enable_leniently
from tests.echoes import Collector, Page, PostgreSQL, Proxy, Query, Redis, listening

if TYPE_CHECKING:
    import socketserver
    from pathlib import Path

SECRET = "s3cr3t"  # noqa: S105  what must not be seen

HOSTILE = (
    f"redis://user:{SECRET}@127.0.0.1:1/0",
    f"redis://:{SECRET}@127.0.0.1:1",
    f"redis://user:{SECRET}",
    f"redis://user:a/{SECRET}@127.0.0.1:1/0",
    f"redis://u:[{SECRET}@127.0.0.1:1",
    f"redis+cluster://u:{SECRET}@127.0.0.1:1",
    f"redis+sentinel://u:{SECRET}@127.0.0.1:1/main",
    f"postgresql://bob:a/{SECRET}@127.0.0.1:1/ledger",
    f"postgresql://bob:a?{SECRET}@127.0.0.1:1/ledger",
    f"postgresql://bob:a#{SECRET}@127.0.0.1:1/ledger",
    f"postgresql://bob:a@{SECRET}@127.0.0.1:1/ledger",
    f"postgresql://bob:{SECRET}",
    f"postgresql://bob@127.0.0.1:{SECRET}/ledger",
    f"postgresql://127.0.0.1:1/ledger?user=bob&password={SECRET}",
    f"postgresql://127.0.0.1:1/ledger?password=a;{SECRET}",
    f"postgresql://bob%3A{SECRET}@127.0.0.1:1/ledger",
    f"redis://127.0.0.1:1/0?p%61ssword=a'{SECRET}",
    f"postgresql://bob:[{SECRET}@127.0.0.1:1/ledger",
    f"mysql://bob:{SECRET}@127.0.0.1/ledger",
    f"sqlite://u:{SECRET}@h",
    f"sqlite://u:{SECRET}@h/[",
    f"http://u:{SECRET}@127.0.0.1:1",
    f"http://u:a/{SECRET}@127.0.0.1:1",
    f"http://{SECRET}@127.0.0.1:1",
    f"http://u:{SECRET}@[127.0.0.1:1",
    f"http://u:[{SECRET}]@127.0.0.1:1",
    f"http://127.0.0.1:{SECRET}",
    f"http://127.0.0.1:1/?token={SECRET}",
    f"https://127.0.0.1:1/?api_key={SECRET}",
    f"bob:{SECRET}@127.0.0.1/ledger",
    f"host=127.0.0.1 user=bob password='{SECRET}'",
    f"://u:{SECRET}@",
)

VARIABLES = (
    *("OTEL_LIMITS_LEDGER", "OTEL_LIMITS_QUOTA_STORE", "OTEL_LIMITS_POLICY"),
    *("OTEL_LIMITS_TIME_ZONE", "OTEL_LIMITS_LEDGER_GROUP", "OTEL_LIMITS_AUDIT_KEYS"),
    *("OTEL_LIMITS_PROMETHEUS_HOST", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS"),
)

OPTIONS = (
    ("audit", "reconcile", "--prometheus"),
    ("dashboards", "preview", "--out", "pictures", "--prometheus"),
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
    ("ledger", "salvage", "--output", "new.db"),
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


def shown(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Everything that a command says."""
    try:
        main(arguments)
    except SystemExit as ending:
        assert ending.code == 2  # noqa: PT017  of argparse, which has said why
    said = capfd.readouterr()
    return said.out + said.err


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
def test_refusal_of_doctor_shows_no_secret(url: str) -> None:
    """Not of an unknown command, and not of a value before it."""
    for command in ((url,), ("env", f"URL={url}", "x"), ("uv", "run", url), ("timeout", url, "x")):
        with pytest.raises(UnknownLauncherError) as refused:
            read_launcher(command, run_options)
        assert SECRET not in refused.value.text + refused.value.advice


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
TOLD = "unknown command|not allowed|no user|cannot.serve|Cluster mode"


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
            "ledger upgrade",
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
    assert "cannot serve" in said
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
        store = open_shared_store(place)
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


@pytest.mark.parametrize(
    ("url", "text", "seen"),
    [
        ("redis://bob:a%2Fbcd@h", "a/bcd a%2Fbcd bob:a/bcd", "*** *** bob:***"),
        ("redis://bob:pw@h", "up, pw, pwd", "up, ***, pwd"),
        ("redis://bob:hunter2000@h", "got 'hunter20", "got '***"),
        ("http://token@h", "no token", "no ***"),
        ("http://bob:secret@h", "Basic Ym9iOnNlY3JldA==", "Basic ***"),
        ("postgresql://bob@h/ledger", "no bob", "no bob"),
        ("redis://h:6379/0?password=a%20bcd", "a bcd", "***"),
    ],
)
def test_secret_is_redacted_in_each_form(url: str, text: str, seen: str) -> None:
    """As in the URL, decoded, in a header, and cut; a short one as a word only."""
    assert redact_secrets(text, secrets_in(url)) == seen


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://user:pw@h:6379/0", "redis://user:***@h:6379/0"),
        ("redis+sentinel://a:1,b:2/main", "redis+sentinel://a:1,b:2/main"),
        ("postgresql://bob@h/ledger?sslmode=require", "postgresql://bob@h/ledger?sslmode=require"),
        ("postgresql://bob:p/w?x@h/ledger", "postgresql://bob:***@h/ledger"),
        ("postgresql://[::1]:5432/ledger", "postgresql://[::1]:5432/ledger"),
        ("https://token@h/v1", "https://***@h/v1"),
        ("/var/lib/ledger.db", "/var/lib/ledger.db"),
        ("sqlite:////var/lib/ledger.db", "sqlite:////var/lib/ledger.db"),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock?db=1"),
    ],
)
def test_public_parts_of_a_url_are_shown(url: str, seen: str) -> None:
    """A reader must recognize the address."""
    assert redact_url(url) == seen


@given(password=st.text(min_size=1), scheme=st.sampled_from(["redis", "postgresql", "http", "x"]))
def test_no_password_of_any_characters_is_shown(password: str, scheme: str) -> None:
    """Escaped or not."""
    assert redact_url(f"{scheme}://bob:<{password}>@h:1/d") == f"{scheme}://bob:***@h:1/d"


@pytest.mark.parametrize(
    "unit",
    ["a", ".", "pass", "password=", "key='", "key ", "a:1,", "a@", "token = ", "["],
    ids=repr,
)
def test_time_to_redact_is_linear(unit: str) -> None:
    """A refused setting of any length is shown without delay."""

    def seconds(length: int) -> float:
        text = f"redis://{(unit * length)[:length]}"
        times = []
        for _ in range(5):
            begin = time.process_time()
            redact_url(text)
            times.append(time.process_time() - begin)
        return min(times)  # the least disturbed by other processes

    # Long enough to measure: three times twice the length, each at most 2.5 times the CPU.
    assert seconds(40_000) <= 2.5**3 * max(seconds(5_000), 0.0005)


def test_long_setting_is_refused_quickly(capsys: pytest.CaptureFixture[str]) -> None:
    """60,000 characters took more than a minute."""
    begin = time.process_time()
    assert main(["run", "--ledger", "pass" * 15_000, "--max-turns", "x" * 60_000, "--", "a"]) == 2
    assert time.process_time() - begin < 5
    assert "--max-turns must be" in capsys.readouterr().err
