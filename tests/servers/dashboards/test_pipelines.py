"""Ledger and rules agree with 200 scripted invocations, over three metric pipelines.

Twenty agents run in a process that is scraped, in two that share their files, and in one that sends
OTLP. One process is killed within a tool.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.dashboards.bridge import bridged
from tests.dashboards.pipeline_agents import (
    AGENTS,
    INPUT,
    OUTPUT,
    POLICY,
    STUCK,
    agent_of,
    dollars,
    kind_of,
    model_of,
)
from tests.dashboards.pipeline_agents import __name__ as PROGRAM  # noqa: N812  it is run
from tests.dashboards.prometheus import Prometheus
from tests.dashboards.servers import RULES, program, until, value_of, watched
from tests.paths import ROOT
from tests.processes import free_port

AUTOLOADED: Final = (
    "from otel_limits.startup import otel_limits_startup; import runpy; "
    "otel_limits_startup.autoload(); "
    f"runpy.run_module({PROGRAM!r}, run_name='__main__')"
)
"""Runs the agents as under `otel-limits autoload install`."""

ALL_AGENTS: Final = list(range(AGENTS))

Key = tuple[str, ...]
"""Labels, without their names."""


# --- the script -----------------------------------------------------------------------------------


@dataclass
class Truth:
    """Expected counters, by name and labels."""

    counters: Counter[tuple[str, tuple[tuple[str, str], ...]]] = field(default_factory=Counter)

    def add(self, counter: str, amount: float, **labels: str) -> None:
        """Add to one series."""
        self.counters[counter, tuple(labels.items())] += amount  # type: ignore[assignment]

    def call(self, agent: str, model: str, calls: int) -> None:
        """Count model calls."""
        self.add("model_calls", calls, agent=agent, model=model, kind="measured")
        self.add("tokens", calls * INPUT, agent=agent, model=model, type="input")
        self.add("tokens", calls * OUTPUT, agent=agent, model=model, type="output")
        self.add("cost_usd", dollars(model, calls), agent=agent, model=model)

    def play(self, number: int) -> None:
        """Count one invocation of an agent."""
        kind, agent = kind_of(number), agent_of(number)
        self.call(agent, model_of(number), kind.calls)
        self.add("stops", 1, agent=agent, reason=kind.reason, action=kind.action_label)

    def by(self, counter: str, *labels: str, **only: str) -> dict[Key, float]:
        """Sum a counter by some labels."""
        sums: Counter[Key] = Counter()
        for (name, items), amount in self.counters.items():
            values = dict(items)
            if name == counter and all(values[label] in texts for label, texts in only.items()):
                sums[tuple(values[label] for label in labels)] += amount
        return dict(sums)


# --- the processes --------------------------------------------------------------------------------


class Process:
    """A process of agents."""

    def __init__(self, directory: Path, truth: Truth, **environ: str) -> None:
        """Start the process."""
        self._truth = truth
        kept = {name: text for name, text in os.environ.items() if "OTEL" not in name}
        self.process = subprocess.Popen(
            [sys.executable, "-c", AUTOLOADED],
            cwd=ROOT,
            env={
                **kept,
                "OTEL_LIMITS_POLICY": str(directory / "limits.yaml"),
                "OTEL_LIMITS_LEDGER": str(directory / "ledger.db"),
                "OTEL_LIMITS_LEDGER_SYNC": "call",
                "OTEL_LIMITS_QUIET": "true",
                **environ,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def expect(self, word: str) -> None:
        """Wait for a line of output."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{word}\n"

    def send(self, command: object) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps(command)}\n")
        self.process.stdin.flush()

    def hang(self) -> None:
        """Start an invocation that never ends."""
        self.send(STUCK)
        self.expect("hanging")
        self._truth.call(STUCK, "model-0", calls=1)

    def end(self) -> None:
        """Let it exit."""
        self.process.communicate(timeout=60)

    def kill(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.communicate(timeout=60)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The processes, their pipelines and the Prometheus that receives their metrics."""

    directory: Path
    truth: Truth
    prometheus: Prometheus
    scraped: dict[str, str]
    serving: dict[str, str]
    """The process that serves the shared files."""
    shared: dict[str, str]
    sent: dict[str, str]
    processes: list[Process]

    def start(self, pipeline: dict[str, str]) -> Process:
        """Start a process with one of the pipelines."""
        self.processes.append(Process(self.directory, self.truth, **pipeline))
        return self.processes[-1]

    def invoke(self, rounds: Mapping[Process, int]) -> None:
        """Invoke every agent several times, in all processes concurrently."""
        for process, number in rounds.items():
            process.send(ALL_AGENTS * number)
        for process, number in rounds.items():
            process.expect("played")
            for agent in ALL_AGENTS * number:
                self.truth.play(agent)

    def wait_for_scrapes(self) -> None:
        """Wait for two scrapes of every job; the first may already be in progress."""
        scrapes = {
            job: f'sum(count_over_time(up{{job="{job}"}}[5m]))'
            for job in ("scraped", "shared", "sent")
        }
        before = {job: value_of(self.prometheus, query) for job, query in scrapes.items()}
        until(
            lambda: all(
                value_of(self.prometheus, query) >= before[job] + 2
                for job, query in scrapes.items()
            ),
            "two more scrapes of each job",
        )


def play(stage: Stage) -> None:
    """Run 200 invocations, and one that never ends."""
    scraped, serving, sent = (
        stage.start(pipeline) for pipeline in (stage.scraped, stage.serving, stage.sent)
    )
    victim = stage.start(stage.shared)
    rounds = {scraped: 3, serving: 2, victim: 1, sent: 1}
    for process in rounds:
        process.expect("ready")
    stage.wait_for_scrapes()
    stage.invoke(rounds)
    victim.hang()
    stage.wait_for_scrapes()
    victim.kill()  # within a tool
    stage.invoke({scraped: 2, sent: 1})
    stage.wait_for_scrapes()
    sent.end()  # which flushes
    stage.wait_for_scrapes()


@dataclass(frozen=True, kw_only=True)
class Played:
    """The scripted counts, and everything that recorded them."""

    truth: Truth
    ledger: Path
    prometheus: Prometheus
    end: float


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    """Run the agents under a real Prometheus."""
    program("prometheus")
    place = tmp_path_factory.mktemp("pipelines")
    with run_agents(place) as played:
        yield played


@contextmanager
def run_agents(place: Path) -> Iterator[Played]:
    """Run the agents, and keep both servers during the tests."""
    (place / "limits.yaml").write_text(POLICY, encoding="utf-8")
    (place / "shared").mkdir()
    truth, ports = Truth(), (str(free_port()), str(free_port()))
    with ExitStack() as open_:
        _, endpoint, port = open_.enter_context(bridged())
        jobs = {"scraped": int(ports[0]), "shared": int(ports[1]), "sent": port}
        url = open_.enter_context(watched(place, jobs, rules=()))
        shared = {"PROMETHEUS_MULTIPROC_DIR": str(place / "shared")}
        stage = Stage(
            directory=place,
            truth=truth,
            prometheus=Prometheus(url),
            scraped={"OTEL_LIMITS_PROMETHEUS_PORT": ports[0]},
            serving={**shared, "OTEL_LIMITS_PROMETHEUS_PORT": ports[1]},
            shared=shared,
            sent={"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_METRIC_EXPORT_INTERVAL": "500"},
            processes=[],
        )
        try:
            play(stage)
        finally:
            for each in stage.processes:
                each.kill()
        end = time.time()
        yield Played(
            truth=truth,
            ledger=place / "ledger.db",
            prometheus=stage.prometheus,
            end=end,
        )


# --- the accounts ---------------------------------------------------------------------------------


def rows(path: Path, query: str) -> dict[Key, float]:
    """Query the ledger: labels, and an amount as the last column."""
    connection = sqlite3.connect(path)
    try:
        return {tuple(labels): amount for *labels, amount in connection.execute(query)}
    finally:
        connection.close()


def test_script_has_200_invocations(played: Played) -> None:
    """Twenty agents, ten rounds."""
    assert sum(played.truth.by("stops").values()) == 200


@pytest.mark.parametrize(
    ("counter", "labels", "query"),
    [
        (
            "stops",
            ("agent", "reason", "action"),
            """
            SELECT agent, CASE action WHEN 'observed' THEN breach_limit ELSE reason END, action,
            count(*) FROM otel_limits_invocations WHERE ended_us IS NOT NULL GROUP BY 1, 2, 3
            """,
        ),
        (
            "model_calls",
            ("agent", "model"),
            "SELECT agent, model, count(*) FROM otel_limits_model_calls GROUP BY 1, 2",
        ),
        (
            "tokens",
            ("agent", "model"),
            """
            SELECT agent, model, sum(input_tokens + output_tokens) FROM otel_limits_model_calls
            GROUP BY 1, 2
            """,
        ),
        (
            "cost_usd",
            ("agent", "model"),
            """
            SELECT agent, model, sum(price_pico) / 1e12 FROM otel_limits_model_calls GROUP BY 1, 2
            """,
        ),
    ],
    ids=["stops", "model calls", "tokens", "USD"],
)
def test_ledger_matches_script(played: Played, counter: str, labels: Key, query: str) -> None:
    """Exactly, including the process that was killed within a tool."""
    assert rows(played.ledger, query) == pytest.approx(played.truth.by(counter, *labels))


ENFORCED = ("halted", "wrapped_up", "raised")


@pytest.mark.parametrize(
    ("record", "labels", "expected"),
    [
        (
            "job_agent_reason:otel_limits_halts:increase15m",
            ("agent", "reason"),
            lambda truth: truth.by("stops", "agent", "reason", action=ENFORCED),
        ),
        (
            "job_agent:otel_limits_stops:increase1h",
            ("agent",),
            lambda truth: truth.by("stops", "agent"),
        ),
        (
            "job_agent:otel_limits_tokens:increase1h",
            ("agent",),
            lambda truth: truth.by("tokens", "agent"),
        ),
        (
            "job_agent:otel_limits_cost_usd:increase1h",
            ("agent",),
            lambda truth: truth.by("cost_usd", "agent"),
        ),
    ],
)
def test_rules_match_script(
    played: Played, record: str, labels: Key, expected: Callable[[Truth], Mapping[Key, float]]
) -> None:
    """Exactly: all series are new in the window of the rule."""
    (rule,) = (
        rule
        for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
        if rule.get("record") == record
    )
    lines = played.prometheus.query(f"sum by ({', '.join(labels)}) ({rule['expr']})", played.end)
    found = {tuple(line.labels[label] for label in labels): line.last for line in lines}
    assert some(found) == pytest.approx(dict(expected(played.truth)))


def some(values: Mapping[Any, float]) -> dict[Any, float]:
    """Drop zeros: series that exist without a scripted event."""
    return {name: value for name, value in values.items() if value}
