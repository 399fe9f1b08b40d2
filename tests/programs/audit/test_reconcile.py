"""The ledger against a real Prometheus, which the test starts and stops."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.audit.counter_growth import counters_of
from otel_limits.cli import main
from otel_limits.core.errors import LedgerError
from otel_limits.dashboards.api import WebAddress
from tests.launching import fresh_environment
from tests.ledger.book import Entry, write
from tests.ledger.fixtures import eventually
from tests.processes import free_port, tied

if TYPE_CHECKING:
    from tests.ledger.fixtures import LedgerFile

PROMETHEUS = shutil.which("prometheus")

needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None and os.environ.get("CI") != "true",
    reason="Prometheus is missing: apt-get install prometheus.",
)

AGENT = """
import sys
import otel_limits
from strands import Agent, tool
from otel_limits.testing import ScriptedModel, endless, uses

otel_limits.enable(otel_limits.Limits(max_turns=4))

@tool
def look() -> str:
    "Look."
    return "nothing"

for _ in range(3):
    model = ScriptedModel(endless(uses("look")))
    Agent(model=model, tools=[look], callback_handler=None, name="worker")("go")
print("done", flush=True)
sys.stdin.read()
"""

CONFIGURATION = """
global: {{scrape_interval: 250ms}}
scrape_configs:
  - job_name: agents
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Three invocations, in a ledger and scraped; yields it and the address of Prometheus."""
    assert PROMETHEUS is not None, "CI needs prometheus"
    directory = tmp_path_factory.mktemp("watched")
    metrics, port = free_port(), free_port()
    configuration = directory / "prometheus.yml"
    configuration.write_text(CONFIGURATION.format(port=metrics), encoding="utf-8")
    program = directory / "agent.py"
    program.write_text(AGENT, encoding="utf-8")
    ledger = directory / "ledger.db"
    variables = {
        "OTEL_LIMITS_LEDGER": str(ledger),
        "OTEL_LIMITS_LEDGER_SYNC": "call",  # no row waits in a spill file
        "OTEL_LIMITS_PROMETHEUS_PORT": str(metrics),
    }
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(
        tied(
            PROMETHEUS,
            f"--config.file={configuration}",
            f"--storage.tsdb.path={directory / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ),
        **quiet,
    )
    agent = subprocess.Popen(
        [sys.executable, str(program)],
        env=fresh_environment(**variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "done\n"
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: scraped(url) == "3")
        yield ledger, url
    finally:
        agent.communicate()
        server.terminate()
        server.wait()


@pytest.fixture
def recorded(watched: tuple[Path, str], ledger: LedgerFile) -> str:
    """The address of that Prometheus; the test's own ledger has the three invocations."""
    source, url = watched
    with (
        contextlib.closing(sqlite3.connect(source)) as old,
        contextlib.closing(sqlite3.connect(ledger.path)) as new,
    ):
        old.backup(new)
    return url


def scraped(url: str) -> str | None:
    """Stops that Prometheus has seen: an invocation publishes its own last."""
    try:
        with urllib.request.urlopen(  # noqa: S310  our own server
            f"{url}/api/v1/query?query=sum(otel_limits_stops_total)"
        ) as response:
            found = json.load(response)["data"]["result"]
    except (urllib.error.URLError, ConnectionError):
        return None
    return str(found[0]["value"][1]) if found else None


@needs_prometheus
def test_both_agree_exactly(recorded: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Model calls and tokens of each agent and model differ by nothing."""
    arguments = ["audit", "reconcile", "--prometheus", recorded, "--tolerance", "0"]
    status = main([*arguments, "--format", "json"])
    answer = json.loads(capsys.readouterr().out)
    rows = answer["reconcile"]
    assert {(r["agent"], r["measure"], r["ledger"], r["prometheus"]) for r in rows} == {
        ("worker", "model calls", 12, 12),
        ("worker", "input tokens", 120, 120),
        ("worker", "output tokens", 60, 60),
    }
    assert [(r["reason"], r["ledger"], r["prometheus"]) for r in answer["stops"]] == [
        ("max_turns", 3, 3)
    ]
    assert status == 0


@needs_prometheus
def test_a_difference_above_the_tolerance_is_status_1(
    recorded: str, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that only the ledger has are named, and decide the exit status."""
    write(ledger.address, Entry(agent="unscraped", at=time.time() - 60))
    arguments = ["audit", "reconcile", "--prometheus", recorded, "--format", "json"]
    assert main(arguments) == 1
    rows = json.loads(capsys.readouterr().out)["reconcile"]
    off = {
        (row["agent"], row["measure"], row["difference"]) for row in rows if row["accepted"] == "no"
    }
    assert off == {
        ("unscraped", "model calls", -1),
        ("unscraped", "input tokens", -100),
        ("unscraped", "output tokens", -20),
    }
    assert main([*arguments, "--tolerance", "100%"]) == 0
    capsys.readouterr()
    assert main(["ledger", "prune", "--older-than", "0d"]) == 0
    capsys.readouterr()
    assert main(arguments) == 1
    assert "Not comparable: the ledger's rows before" in capsys.readouterr().out


def test_a_prometheus_that_does_not_answer(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence names it; nothing has been compared, so the status is 2."""
    write(ledger.address, Entry())
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["audit", "reconcile", "--prometheus", url]) == 2
    assert f"{url} did not return a Prometheus response (" in capsys.readouterr().err


@pytest.mark.parametrize(
    "result",
    [
        '{"value": [1, "2"]}',
        "[1]",
        '[{"stream": {}, "values": [[1, "2"]]}]',
        '[{"metric": {}, "values": [[1]]}]',
        '[{"metric": {}, "values": [[1, "many"]]}]',
        '[{"metric": [], "value": [1, "2"]}]',
        '[{"metric": {}}]',
        "[" * 100_000,
    ],
)
def test_non_prometheus_answer_is_rejected(
    ledger: LedgerFile,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    result: str,
) -> None:
    """Anything may listen at an address, and no answer of it is a traceback."""
    write(ledger.address, Entry())
    body = f'{{"data": {{"result": {result}}}}}'.encode()
    monkeypatch.setattr(WebAddress, "open", lambda *_, **__: io.BytesIO(body))
    assert main(["audit", "reconcile", "--prometheus", "http://some.where"]) == 2
    assert "http://some.where did not return a Prometheus response" in capsys.readouterr().err


def test_only_http_is_asked() -> None:
    """No file is read by an address."""
    with pytest.raises(LedgerError, match="must begin with http://"):
        counters_of("file:///etc/passwd", None)("up", 0)
