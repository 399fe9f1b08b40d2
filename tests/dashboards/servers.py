"""Starts and stops a real Prometheus and the agents that it scrapes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest

from otel_limits.dashboards.api import PrometheusError
from tests.dashboards import workload
from tests.dashboards.panels import TimeRange
from tests.dashboards.prometheus import Prometheus
from tests.paths import ROOT
from tests.processes import free_port, tied

RULES = ROOT / "dashboards/prometheus/rules.yaml"

SCRAPE_SECONDS = 1.0
PATIENCE_SECONDS = 90.0

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
"""
JOB = """
  - job_name: {job}
    honor_labels: true
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""
"""`honor_labels` keeps the instance that a collector reports."""


def program(name: str) -> str:
    """Find a program of Debian's package `prometheus`; skip without it, except in CI."""
    path = shutil.which(name)
    if path is not None:
        return path
    message = f"{name} is not installed. Run: apt-get install prometheus"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


def newer(name: str) -> str:
    """Find a program of Prometheus 3 in the directory PROMETHEUS_3 or on PATH."""
    path = shutil.which(name, path=os.environ.get("PROMETHEUS_3"))
    if path is not None and major_version(path) >= 3:
        return path
    pytest.skip(f"{name} of Prometheus 3 is not installed. Set PROMETHEUS_3 to its directory.")


def major_version(path: str) -> int:
    """Return the major version of a program of Prometheus."""
    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"version (\d+)\.", output)
    assert found is not None, output
    return int(found[1])


Find: TypeAlias = Callable[[str], str]
"""`program` or `newer`."""

RELEASES: Final = (pytest.param(program, id="of Debian"), pytest.param(newer, id="3"))


def until(claim: Callable[[], Any], what: str) -> Any:
    """Poll until the claim is true."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            answer = claim()
        except PrometheusError:
            answer = None
        if answer:
            return answer
        time.sleep(0.1)
    pytest.fail(f"Not within {PATIENCE_SECONDS:.0f} s: {what}.")


class Agents:
    """The process of the agents."""

    def __init__(self, directory: Path) -> None:
        """Start it and wait until every series exists."""
        self.port = free_port()
        policy = directory / "limits.yaml"
        policy.write_text(workload.POLICY, encoding="utf-8")
        self._log = (directory / "agents.log").open("w", encoding="utf-8")
        self.process = subprocess.Popen(
            [sys.executable, "-m", workload.__name__],
            cwd=ROOT,
            env={
                **{name: text for name, text in os.environ.items() if "OTEL" not in name},
                **workload.SETTINGS,
                "OTEL_LIMITS_POLICY": str(policy),
                "OTEL_LIMITS_PROMETHEUS_PORT": str(self.port),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._receive("warm")

    def play_round(self) -> dict[str, str]:
        """Invoke all agents; return the trace IDs of halts."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        traces: dict[str, str] = self._receive("played")["traces"]
        return traces

    def end(self) -> None:
        """Let it exit."""
        self.process.communicate(timeout=60)
        self._log.close()

    def _receive(self, event: str) -> Any:
        assert self.process.stdout is not None
        message = json.loads(self.process.stdout.readline() or "{}")
        assert message.get("event") == event, Path(self._log.name).read_text(encoding="utf-8")
        return message


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The agents that were invoked, and the Prometheus that scraped them."""

    prometheus: Prometheus
    url: str
    port: int
    """Port of the agents' metrics."""
    rounds: int
    traces: dict[str, str]
    """Trace IDs of the halts of the last round, by agent."""
    window: TimeRange
    """From before the first round to after the last."""
    version: str


@contextmanager
def watched(
    directory: Path,
    ports: Mapping[str, int],
    rules: Iterable[Path] = (RULES,),
    find: Find = program,
    features: str = "exemplar-storage",
) -> Iterator[str]:
    """Run a Prometheus that scrapes one port per job; yield its URL."""
    own_port = free_port()
    config = directory / "prometheus.yaml"
    jobs = "".join(JOB.format(job=job, port=port) for job, port in ports.items())
    files = ", ".join(map(str, rules))
    config.write_text(CONFIG.format(rules=files) + jobs, encoding="utf-8")
    with (directory / "prometheus.log").open("w", encoding="utf-8") as log:
        server = subprocess.Popen(
            tied(
                find("prometheus"),
                f"--config.file={config}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{own_port}",
                f"--enable-feature={features}",
            ),
            stdout=log,
            stderr=log,
        )
        try:
            yield f"http://127.0.0.1:{own_port}"
        finally:
            server.terminate()
            server.wait(30)


@contextmanager
def scene(directory: Path, rounds: int) -> Iterator[Scene]:
    """Play rounds of agents after Prometheus has scraped every series."""
    with rehearsed(directory) as (agents, url, prometheus):
        start = time.time()
        wait_for_scrape(prometheus)
        for _ in range(rounds):
            traces = agents.play_round()
        wait_for_scrape(prometheus)
        end = time.time()
        yield Scene(
            prometheus=prometheus,
            url=url,
            port=agents.port,
            rounds=rounds,
            traces=traces,
            window=TimeRange(start=start, end=end, step=1.0, scrape_interval=SCRAPE_SECONDS),
            version=prometheus.query("otel_limits_build_info", end)[0].labels["version"],
        )


def wait_for_scrape(prometheus: Prometheus) -> None:
    """Wait for a scrape that starts after now; the first one may already be in progress."""
    scrapes = "count_over_time(otel_limits_build_info[5m])"
    seen = value_of(prometheus, scrapes)
    until(lambda: value_of(prometheus, scrapes) >= seen + 2, "two more scrapes")


@contextmanager
def rehearsed(directory: Path) -> Iterator[tuple[Agents, str, Prometheus]]:
    """Yield agents whose series Prometheus has scraped, and that Prometheus with its URL."""
    program("prometheus")
    agents = Agents(directory)
    try:
        with watched(directory, {"agents": agents.port}) as url:
            prometheus = Prometheus(url)
            until(
                lambda: value_of(prometheus, "otel_limits_build_info") == 1,
                "Prometheus scrapes the agents",
            )
            yield agents, url, prometheus
    finally:
        agents.end()


def value_of(prometheus: Prometheus, expr: str) -> float:
    """Return the single value of a query now, 0 if it has none."""
    lines = prometheus.query(expr, time.time())
    return lines[0].last if lines else 0.0


@contextmanager
def remembering(
    directory: Path,
    samples: str,
    users: str = "",
    authorization: str | None = None,
    find: Find = program,
) -> Iterator[str]:
    """Run a Prometheus with these samples in its past; yield its URL.

    Args:
        directory: Its working directory.
        samples: Samples in the OpenMetrics format, for promtool.
        users: Its web configuration, if it requires credentials.
        authorization: Credentials for it.
        find: Finds the programs of one release.
    """
    (directory / "samples").write_text(samples, encoding="utf-8")
    command = ["tsdb", "create-blocks-from", "openmetrics", "samples", "data"]
    subprocess.run(
        [find("promtool"), *command], cwd=directory, check=True, capture_output=True, timeout=60
    )
    (directory / "prometheus.yaml").write_text("global: {}\n", encoding="utf-8")
    (directory / "web.yaml").write_text(users, encoding="utf-8")
    port = free_port()
    server = subprocess.Popen(
        tied(
            find("prometheus"),
            f"--config.file={directory / 'prometheus.yaml'}",
            f"--web.config.file={directory / 'web.yaml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            "--storage.tsdb.retention.time=10y",
            f"--web.listen-address=127.0.0.1:{port}",
        ),
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        prometheus = Prometheus(url, authorization)
        until(lambda: prometheus.query("vector(1)", 0), "Prometheus answers")
        yield url
    finally:
        server.terminate()
        server.wait(30)


MINUTE = 60
SCRAPES = 2
"""Times that each page is scraped, a minute apart."""


def past(scrapes: Sequence[str], end: float) -> str:
    """Return the samples of pages that were scraped before `end`, grouped by metric."""
    target = 'job="agents",instance="agents-0:9464"'
    metrics: dict[str, list[str]] = {}
    times = [end - MINUTE * n for n in reversed(range(len(scrapes) * SCRAPES))]
    for number, when in enumerate(times):
        for line in scrapes[number // SCRAPES].splitlines():
            if line.startswith("# TYPE"):
                samples = metrics.setdefault(line, [])
            elif line.startswith("otel_limits"):
                series, _, value = line.partition(" # ")[0].rpartition(" ")
                name, _, labels = series.partition("{")
                own = f",{labels}" if labels else "}"
                samples.append(f"{name}{{{target}{own} {value} {when:.3f}")
    lines = (line for of, samples in metrics.items() if samples for line in (of, *samples))
    return "\n".join((*lines, "# EOF", ""))
