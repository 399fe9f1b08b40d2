"""Four accounts of 200 invocations agree: what was scripted, ledger, rules and panels.

Twenty agents are invoked in processes that are scraped, that share their files, and that send OTLP.
One stops answering for a while and is then restarted, two are killed, one of them within a tool.
What every panel must show is asked of a second Prometheus, which has nothing but what was scripted.
"""

from __future__ import annotations

import json
import os
import re
import signal
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

from otel_limits.dashboards import panels
from otel_limits.dashboards.api import Prometheus
from otel_limits.dashboards.files import directory
from otel_limits.dashboards.panels import Target, TimeRange
from tests.dashboards.bridge import Bridge, bridged
from tests.dashboards.reconciling import (
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
from tests.dashboards.reconciling import __name__ as PROGRAM  # noqa: N812  it is run
from tests.dashboards.servers import (
    ROOT,
    RULES,
    program,
    remembering,
    until,
    value_of,
    watched,
)
from tests.processes import free_port

AUTOLOADED: Final = (
    "import otel_limits_startup, runpy; otel_limits_startup.autoload(); "
    f"runpy.run_module({PROGRAM!r}, run_name='__main__')"
)
"""What `otel-limits autoload install` has every Python of an environment begin with."""

EVERYBODY: Final = list(range(AGENTS))

Key = tuple[str, ...]
"""Labels, without their names."""


# --- the script -----------------------------------------------------------------------------------


@dataclass
class Truth:
    """What the counters must say, by name and labels."""

    counters: Counter[tuple[str, tuple[tuple[str, str], ...]]] = field(default_factory=Counter)

    def add(self, counter: str, amount: float, **labels: str) -> None:
        """Count."""
        self.counters[counter, tuple(labels.items())] += amount  # type: ignore[assignment]

    def call(self, agent: str, model: str, calls: int, tools: int, tool: str = "search") -> None:
        """Count so many turns, with their tools."""
        self.add("turns", calls, agent=agent)
        self.add("cycles", calls, agent=agent)
        self.add("model_calls", calls, agent=agent, model=model, kind="measured")
        self.add("tokens", calls * INPUT, agent=agent, model=model, type="input")
        self.add("tokens", calls * OUTPUT, agent=agent, model=model, type="output")
        self.add("cost_usd", dollars(model, calls), agent=agent, model=model)
        if tools:
            self.add("tool_calls", tools, agent=agent, tool=tool, status="success")

    def play(self, number: int) -> None:
        """Count an invocation of an agent."""
        kind, agent = kind_of(number), agent_of(number)
        self.call(agent, model_of(number), kind.calls, kind.tools)
        self.add("stops", 1, agent=agent, reason=kind.reason, action=kind.taken)
        if kind.taken in ("halted", "raised"):
            self.add("synthetic_messages", 1, agent=agent, reason=kind.reason)

    def by(self, counter: str, *labels: str, **only: str) -> dict[Key, float]:
        """Sums of a counter by some labels."""
        sums: Counter[Key] = Counter()
        for (name, items), amount in self.counters.items():
            told = dict(items)
            if name == counter and all(told[label] in texts for label, texts in only.items()):
                sums[tuple(told[label] for label in labels)] += amount
        return dict(sums)

    def samples(self, start: float, end: float) -> str:
        """Write a process that counted all of it, in one step, and was never restarted."""
        seconds = [start + n for n in range(int(end - start))]
        process = '{job="truth",instance="truth"}'
        lines = ["# TYPE otel_limits_build_info gauge"]
        lines += [f"otel_limits_build_info{process} 1 {second:.3f}" for second in seconds]
        middle = (start + end) / 2
        for name in sorted({name for name, _ in self.counters}):
            lines.append(f"# TYPE otel_limits_{name} counter")
            for (counter, items), amount in self.counters.items():
                if counter == name:
                    labels = ",".join(f'{label}="{text}"' for label, text in items)
                    series = f'otel_limits_{name}_total{{job="truth",instance="truth",{labels}}}'
                    lines += [
                        f"{series} {amount if second >= middle else 0} {second:.3f}"
                        for second in seconds
                    ]
        return "\n".join((*lines, "# EOF", ""))


# --- the processes --------------------------------------------------------------------------------


class Process:
    """A process of agents."""

    def __init__(self, directory: Path, truth: Truth, **environ: str) -> None:
        """Start it."""
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

    def hear(self, word: str) -> None:
        """Wait until it says that."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{word}\n"

    def ask(self, what: object) -> None:
        """Have it do something."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps(what)}\n")
        self.process.stdin.flush()

    def hang(self) -> None:
        """Begin an invocation that only a kill ends."""
        self.ask(STUCK)
        self.hear("hanging")
        self._truth.call(STUCK, "model-0", calls=1, tools=0)

    def end(self) -> None:
        """Let it come to its end."""
        self.process.communicate(timeout=60)

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.communicate(timeout=60)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Where all of it is played."""

    directory: Path
    truth: Truth
    prometheus: Prometheus
    bridge: Bridge
    scraped: dict[str, str]
    serving: dict[str, str]
    """The process that answers for those that share its files."""
    shared: dict[str, str]
    sent: dict[str, str]
    processes: list[Process]

    def start(self, way: dict[str, str]) -> Process:
        """Start a process whose metrics leave it in one of the three ways."""
        self.processes.append(Process(self.directory, self.truth, **way))
        return self.processes[-1]

    def invoke(self, rounds: Mapping[Process, int]) -> None:
        """Have processes invoke every agent so many times, all at once."""
        for process, number in rounds.items():
            process.ask(EVERYBODY * number)
        for process, number in rounds.items():
            process.hear("played")
            for agent in EVERYBODY * number:
                self.truth.play(agent)

    def seen(self) -> None:
        """Wait until every job has been scraped after now, twice: one may be under way."""
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
    """Two hundred invocations, and one that never ends."""
    scraped, serving, sent = (
        stage.start(way) for way in (stage.scraped, stage.serving, stage.sent)
    )
    victim = stage.start(stage.shared)
    begun = {scraped: 3, serving: 2, victim: 1, sent: 1}
    for process in begun:
        process.hear("ready")
    stage.seen()
    stage.invoke(begun)
    victim.hang()
    stage.seen()
    victim.kill()  # within a tool
    fail_a_scrape(stage, scraped)
    scraped.end()
    again = stage.start(stage.scraped)
    again.hear("ready")
    stage.invoke({again: 1, sent: 1})
    stage.seen()
    stage.invoke({again: 1})
    stage.seen()
    again.kill()
    sent.end()  # which sends what is left
    stage.seen()


def fail_a_scrape(stage: Stage, process: Process) -> None:
    """Have a process not answer until Prometheus has noticed, and then go on."""
    process.process.send_signal(signal.SIGSTOP)
    until(lambda: value_of(stage.prometheus, 'up{job="scraped"} == bool 0') == 1, "a scrape fails")
    process.process.send_signal(signal.SIGCONT)
    until(lambda: value_of(stage.prometheus, 'up{job="scraped"}') == 1, "it is scraped again")


@dataclass(frozen=True, kw_only=True)
class Played:
    """What was played, and who knows of it."""

    truth: Truth
    ledger: Path
    prometheus: Prometheus
    scripted: Prometheus
    """One that has nothing but what was scripted."""
    window: TimeRange


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    """Play it, before a real Prometheus."""
    program("prometheus")
    place = tmp_path_factory.mktemp("reconciled")
    with played_in(place) as played:
        yield played


@contextmanager
def played_in(place: Path) -> Iterator[Played]:
    """Play it, and keep both servers until it was looked at."""
    (place / "limits.yaml").write_text(POLICY, encoding="utf-8")
    (place / "shared").mkdir()
    (place / "scripted").mkdir()
    truth, ports = Truth(), (str(free_port()), str(free_port()))
    with ExitStack() as open_:
        bridge, endpoint, port = open_.enter_context(bridged())
        jobs = {"scraped": int(ports[0]), "shared": int(ports[1]), "sent": port}
        url = open_.enter_context(watched(place, jobs, rules=()))
        start = time.time()
        shared = {"PROMETHEUS_MULTIPROC_DIR": str(place / "shared")}
        stage = Stage(
            directory=place,
            truth=truth,
            prometheus=Prometheus(url),
            bridge=bridge,
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
        samples = truth.samples(start, end)
        scripted = open_.enter_context(remembering(place / "scripted", samples))
        yield Played(
            truth=truth,
            ledger=place / "ledger.db",
            prometheus=stage.prometheus,
            scripted=Prometheus(scripted),
            window=TimeRange(start=start, end=end, step=1.0, scrape_interval=1.0),
        )


# --- the accounts ---------------------------------------------------------------------------------


def rows(path: Path, query: str) -> dict[Key, float]:
    """Ask the ledger: labels, and an amount at the end of each row."""
    connection = sqlite3.connect(path)
    try:
        return {tuple(labels): amount for *labels, amount in connection.execute(query)}
    finally:
        connection.close()


def test_two_hundred_invocations_were_played(played: Played) -> None:
    """By twenty agents, and as many stops."""
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
    ids=["stops", "model calls", "tokens", "US dollars"],
)
def test_the_ledger_has_what_was_scripted(
    played: Played, counter: str, labels: Key, query: str
) -> None:
    """To the event and the token, also of the process that was killed within a tool."""
    assert rows(played.ledger, query) == pytest.approx(played.truth.by(counter, *labels))


ENFORCED = ("halted", "wrapped_up", "raised")


@pytest.mark.parametrize(
    ("record", "labels", "expected"),
    [
        (
            "job_agent_reason:otel_limits_stops:increase15m",
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
def test_the_rules_count_what_was_scripted(
    played: Played, record: str, labels: Key, expected: Callable[[Truth], Mapping[Key, float]]
) -> None:
    """Exactly: no series began again more than once and stayed below what it had been."""
    (rule,) = (
        rule
        for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
        if rule.get("record") == record
    )
    lines = played.prometheus.query(
        f"sum by ({', '.join(labels)}) ({rule['expr']})", played.window.end
    )
    found = {tuple(line.labels[label] for label in labels): line.last for line in lines}
    assert some(found) == pytest.approx(dict(expected(played.truth)))


def some(values: Mapping[Any, float]) -> dict[Any, float]:
    """Leave out what is 0: nobody scripted that it is there."""
    return {name: value for name, value in values.items() if value}


SCRIPTED = frozenset(
    f"otel_limits_{name}_total"
    for name in (
        "stops",
        "turns",
        "cycles",
        "model_calls",
        "tokens",
        "cost_usd",
        "tool_calls",
        "synthetic_messages",
    )
)
"""Counters that the script knows."""


def asked_by(target: Target) -> set[str]:
    """Metrics that a query asks for."""
    return set(re.findall(r"otel_limits_\w+", target.expr))


TARGETS = {
    f"{board.name}: {panel.title}: {number}": target
    for board in panels.read_all(directory())
    for panel in board.panels
    for number, target in enumerate(panel.targets)
    if SCRIPTED & asked_by(target) and asked_by(target) <= SCRIPTED | {"otel_limits_build_info"}
}
"""Every query that asks for these alone."""


def test_every_counter_that_was_scripted_is_on_a_panel() -> None:
    """Whatever the dashboards look like: what is not asked for is not compared."""
    asked = {
        name for each in TARGETS.values() for name in re.findall(r"otel_limits_\w+", each.expr)
    }
    assert asked - {"otel_limits_build_info"} == SCRIPTED - {"otel_limits_cycles_total"}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_every_panel_shows_what_was_scripted(played: Played, target: Target) -> None:
    """Over the whole play, as a Prometheus would that saw one process which counted all of it."""
    shown, scripted = (
        some(answer(prometheus, played.window, target))
        for prometheus in (played.prometheus, played.scripted)
    )
    assert scripted or not shown
    assert shown == pytest.approx(scripted)


def answer(prometheus: Prometheus, window: TimeRange, target: Target) -> dict[str, float]:
    """Evaluate a query once, with every interval as long as the play.

    Of a ranking every rank: which of those with equal values are the last ones shown is open.
    """
    milliseconds = f"{window.range * 1000:.0f}"
    expr = window.fill(
        re.sub(r"^topk\(\d+", "topk(1000", target.expr),
        {"__interval": f"{milliseconds}ms", "__interval_ms": milliseconds},
    )
    return {line.named(target.legend): line.last for line in prometheus.query(expr, window.end)}
