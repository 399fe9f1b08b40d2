"""Draws the pictures of `dashboards/README.md`: `python -m tests.dashboards.pictures`.

They show a simulated fleet. Its metrics of more than a day are written into a real Prometheus, and
the last six hours are drawn as Grafana would show them.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Final

from PIL import Image

from otel_limits.core.limits import LIMITS
from otel_limits.observers.metrics import METRICS
from tests.dashboards.draw import draw_all
from tests.dashboards.panels import TimeRange
from tests.dashboards.prometheus import Prometheus
from tests.dashboards.servers import remembering
from tests.paths import ROOT

HOUR: Final = 3600
SHOWN: Final = 6 * HOUR
HISTORY: Final = 20 * HOUR
"""More than a day in all, which the projected cost needs."""
INTERVAL: Final = 30
HISTORY_INTERVAL: Final = 300
POINTS: Final = 120
"""Points per series, about as many as a panel can show."""

PRICES: Final = {
    "claude-haiku-4-5": (1.0, 5.0),
    "claude-sonnet-4-5": (3.0, 15.0),
    "claude-opus-4-5": (5.0, 25.0),
    "nova-pro": (0.8, 3.2),
}
"""USD per million input and output tokens."""

LONG_STEP: Final = 900
"""Seconds between the points of percentiles."""

SPECS: Final = {spec.name: spec for spec in METRICS}

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Worker:
    """An agent, its traffic and its limits."""

    name: str
    instance: str
    model: str
    per_hour: float
    turns: float
    """Typical turns of an invocation."""
    prompt: int
    """Input tokens of the first turn."""
    limits: Mapping[str, float]
    halts: Mapping[str, float]
    """Share of invocations halted, by reason."""
    tools: tuple[str, ...]
    would_be: float = 0.0
    """Share of invocations that only reach max_turns in observe mode."""
    seconds_per_turn: float = 2.5
    tool_cap: bool = False
    """Whether its first tool has a cap."""


FLEET: Final = (
    Worker(
        name="support-triage",
        instance="support-0:9464",
        model="claude-haiku-4-5",
        per_hour=70,
        turns=4,
        prompt=3_000,
        limits={"max_turns": 15, "max_cost_usd": 0.5},
        halts={"max_turns": 0.008, "max_duration": 0.003},
        tools=("search_tickets", "reply"),
    ),
    Worker(
        name="onboarding-guide",
        instance="support-0:9464",
        model="llama-3.3-70b",
        per_hour=12,
        turns=5,
        prompt=2_500,
        limits={"max_turns": 15},
        halts={"max_turns": 0.01},
        tools=("search_docs",),
    ),
    Worker(
        name="invoice-matcher",
        instance="finance-0:9464",
        model="claude-haiku-4-5",
        per_hour=45,
        turns=6,
        prompt=5_000,
        limits={"max_turns": 20, "max_identical_tool_calls": 5},
        halts={"loop_detected": 0.035, "max_turns": 0.008},
        tools=("query_ledger", "match_invoice"),
    ),
    Worker(
        name="contract-summarizer",
        instance="finance-0:9464",
        model="claude-sonnet-4-5",
        per_hour=14,
        turns=4,
        prompt=14_000,
        limits={"max_turns": 12, "max_token_budget": 400_000},
        halts={"max_token_budget": 0.03},
        tools=("read_document",),
    ),
    Worker(
        name="code-reviewer",
        instance="engineering-0:9464",
        model="claude-sonnet-4-5",
        per_hour=20,
        turns=9,
        prompt=6_000,
        limits={"max_turns": 30, "max_token_budget": 1_000_000},
        halts={"max_turns": 0.02, "max_token_budget": 0.012},
        tools=("read_file", "run_tests", "search_code"),
        seconds_per_turn=4.0,
    ),
    Worker(
        name="release-notes",
        instance="engineering-0:9464",
        model="nova-pro",
        per_hour=6,
        turns=5,
        prompt=8_000,
        limits={"max_turns": 15},
        halts={},
        tools=("git_log",),
    ),
    Worker(
        name="incident-responder",
        instance="engineering-1:9464",
        model="claude-sonnet-4-5",
        per_hour=5,
        turns=11,
        prompt=7_000,
        limits={"max_turns": 40, "max_duration_seconds": 300},
        halts={"max_duration": 0.05},
        tools=("query_logs", "query_metrics"),
        seconds_per_turn=6.0,
    ),
    Worker(
        name="meeting-notes",
        instance="batch-0:9464",
        model="nova-pro",
        per_hour=16,
        turns=3,
        prompt=9_000,
        limits={"max_turns": 8},
        halts={},
        tools=("read_calendar",),
        would_be=0.04,
    ),
    Worker(
        name="research-assistant",
        instance="research-0:9464",
        model="claude-opus-4-5",
        per_hour=14,
        turns=12,
        prompt=11_000,
        limits={"max_turns": 50, "max_cost_usd": 5},
        halts={"max_cost_usd": 0.05, "max_turns": 0.03},
        tools=("web_search", "fetch_page"),
        tool_cap=True,
        seconds_per_turn=5.0,
    ),
)
BURNING: Final = "research-assistant"
"""In the last 80 minutes, it needs many more turns."""
BURNING_SECONDS: Final = 80 * 60

ENDED: Final = "batch-0:9464"
"""A finished batch job."""
ENDED_SECONDS: Final = 25 * 60

QUOTAS: Final = (
    ("daily-spend", "research", 200.0, 0.31, 0.93),
    ("daily-spend", "engineering", 150.0, 0.35, 0.64),
    ("weekly-tokens", "support", 60e6, 0.22, 0.47),
    ("weekly-tokens", "finance", 40e6, 0.30, 0.71),
    ("opus-calls", "research-assistant", 3_000.0, 0.20, 0.58),
)
"""Quota, key, limit, and utilization at the start and at the end."""
HOURS_LEFT: Final = {"daily-spend": 4.2, "weekly-tokens": 76.2, "opus-calls": 4.2}
"""Hours until a quota resets."""


@dataclass
class Fleet:
    """Counts of the whole fleet, as its processes would serve them."""

    end: float
    random: Random = field(default_factory=lambda: Random(11))  # noqa: S311  a simulation
    values: dict[tuple[str, Labels], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Create all series, as otel-limits does when an agent first runs."""
        for worker in FLEET:
            for reason in ("end_turn", "error", "aborted"):
                self._finish(worker, reason, "none", 0)
            for reason in worker.halts:
                self._finish(worker, reason, "halted", 0)
            if worker.would_be:
                self._finish(worker, "max_turns", "observed", 0)
            for tool in worker.tools:
                for status in ("success", "error"):
                    self.add("tool_calls_total", worker, 0, tool=tool, status=status)
            for kind in ("measured", "estimated"):
                self.add("model_calls_total", worker, 0, model=worker.model, kind=kind)
            self._use(worker, 0, 0, 0)
            for limit, cap in worker.limits.items():
                self.set("limit", worker.instance, cap, agent=worker.name, limit=limit)
        self._create_processes()

    def _create_processes(self) -> None:
        for instance in {worker.instance for worker in FLEET}:
            self.set(
                "build_info", instance, 1, version=version("otel-limits"), service_version="2.14.0"
            )
            self.set("enforcing", instance, 1, source="run")
            self.set("policy_valid", instance, 1)
            for component in ("observer", "ledger"):
                self._count("internal_errors_total", instance, 0, component=component)
            self._count("observer_dropped_events_total", instance, 0, observer="audit_webhook")
        for quota, decision in (("daily-spend", "refused"), ("opus-calls", "waited")):
            self._count(
                "quota_decisions_total", "research-0:9464", 0, quota=quota, decision=decision
            )

    def set(self, name: str, instance: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self.values[f"otel_limits_{name}", (("instance", instance), *labels.items())] = value

    def _count(self, name: str, instance: str, amount: float, **labels: str) -> None:
        key = f"otel_limits_{name}", (("instance", instance), *labels.items())
        self.values[key] = self.values.get(key, 0.0) + amount

    def add(self, name: str, worker: Worker, amount: float, **labels: str) -> None:
        """Add to a counter of an agent."""
        self._count(name, worker.instance, amount, agent=worker.name, **labels)

    def observe(self, name: str, worker: Worker, value: float, **labels: str) -> None:
        """Add an observation to a histogram of an agent."""
        for bound in (*SPECS[f"otel_limits_{name}"].buckets, math.inf):
            le = "+Inf" if bound == math.inf else repr(float(bound))
            self.add(f"{name}_bucket", worker, value <= bound, **labels, le=le)
        self.add(f"{name}_sum", worker, value, **labels)
        self.add(f"{name}_count", worker, 1, **labels)

    def advance(self, seconds_left: float, interval: float) -> None:
        """Run the fleet for one interval."""
        progress = max(0.0, 1 - seconds_left / (SHOWN + HOUR))
        tide = 0.75 + 0.35 * math.sin(2.2 * math.pi * progress)
        for worker in FLEET:
            expected = worker.per_hour * tide * interval / HOUR
            for _ in range(self._poisson(expected)):
                self._invoke(worker, seconds_left)
            in_progress = self._poisson(expected * 2)
            self.set("invocations_in_progress", worker.instance, in_progress, agent=worker.name)
        self._use_quotas(progress, seconds_left)
        if self.random.random() < interval / (2 * HOUR):
            self._count("internal_errors_total", "finance-0:9464", 1, component="observer")
            self._count(
                "observer_dropped_events_total", "finance-0:9464", 1, observer="audit_webhook"
            )

    def _invoke(self, worker: Worker, seconds_left: float) -> None:
        is_burning = worker.name == BURNING and seconds_left < BURNING_SECONDS
        cap = worker.limits["max_turns"]
        usual = worker.turns * (2.5 if is_burning else 1)
        turns: float = self.random.lognormvariate(math.log(usual), 0.35)
        turns = max(1, min(cap - 1, round(turns)))
        draw, reason, action = self.random.random(), "end_turn", "none"
        for name, share in worker.halts.items():
            if draw < share * (3 if is_burning else 1):
                reason, action = name, "halted"
                break
            draw -= share * (3 if is_burning else 1)
        if action == "none" and self.random.random() < worker.would_be:
            reason, action = "max_turns", "observed"
        elif action == "none" and self.random.random() < 0.012:
            reason = self.random.choice(("error", "aborted"))
        if action != "none":
            turns = cap if reason == "max_turns" else min(cap - 1, turns * 2)
        self._finish(worker, reason, action, 1)
        self._work(worker, turns)
        for limit in worker.limits:
            is_reached = LIMITS[limit].reason == reason
            share = turns / cap * self.random.uniform(0.6, 1.0)
            used = turns / cap if limit == "max_turns" else min(0.97, share)
            self.observe("budget_used_ratio", worker, 1.0 if is_reached else used, limit=limit)

    def _finish(self, worker: Worker, reason: str, action: str, amount: int) -> None:
        self.add("stops_total", worker, amount, reason=reason, action=action)

    def _work(self, worker: Worker, turns: float) -> None:
        output = sum(self.random.randint(150, 900) for _ in range(int(turns)))
        prompts = [worker.prompt + 1_100 * turn for turn in range(int(turns))]
        cached = sum(prompts[:-1])
        self._use(worker, sum(prompts), output, int(cached * 0.8))
        self.add("turns_total", worker, turns)
        self.add("model_calls_total", worker, turns, model=worker.model, kind="measured")
        if self.random.random() < 0.004:
            self.add("model_calls_total", worker, 1, model=worker.model, kind="estimated")
        for _ in range(int(turns)):
            status = "error" if self.random.random() < 0.04 else "success"
            tool = self.random.choice(worker.tools)
            self.add("tool_calls_total", worker, 1, tool=tool, status=status)
        if worker.tool_cap and turns > 1.5 * worker.turns:
            labels = {"tool": worker.tools[0], "limit": "max_calls_per_tool", "action": "refused"}
            self.add("tool_refusals_total", worker, 1, **labels)
        self.observe("invocation_turns", worker, turns)
        self.observe("invocation_tokens", worker, sum(prompts) + output)
        seconds = turns * worker.seconds_per_turn * self.random.uniform(0.7, 1.5)
        self.observe("invocation_duration_seconds", worker, seconds)
        if worker.name == "release-notes":
            self.add("unsampled_invocations_total", worker, 1)

    def _use(self, worker: Worker, read: int, written: int, cached: int) -> None:
        model = worker.model
        self.add("tokens_total", worker, read, model=model, type="input")
        self.add("tokens_total", worker, written, model=model, type="output")
        self.add("cached_tokens_total", worker, cached, model=model, kind="read")
        if model in PRICES:
            per_input, per_output = PRICES[model]
            # Cached input costs a tenth.
            dollars = ((read - 0.9 * cached) * per_input + written * per_output) / 1e6
            self.add("cost_usd_total", worker, dollars, model=model)
        else:
            self.add("unpriced_tokens_total", worker, read + written, model=model)

    def _use_quotas(self, progress: float, seconds_left: float) -> None:
        instance = "research-0:9464"
        for quota, key, limit, start, end in QUOTAS:
            # Research is slow at first, and burns at the end.
            shape = progress**2.5 if key == "research" else progress
            used = limit * (start + (end - start) * shape)
            labels = {"quota": quota, "key": key}
            self.set("quota_used", instance, used, **labels)
            self.set("quota_reserved", instance, limit * 0.008, **labels)
            self.set("quota_limit", instance, limit, **labels)
            resets = self.end + HOURS_LEFT[quota] * HOUR
            self.set("quota_resets_timestamp_seconds", instance, resets, **labels)
        waiting = self._poisson(1.4) if seconds_left < BURNING_SECONDS else self._poisson(0.05)
        self.set("quota_waiting", instance, waiting, quota="opus-calls")
        if waiting > 1:
            decision = {"quota": "opus-calls", "decision": "waited"}
            self._count("quota_decisions_total", instance, waiting, **decision)
        if seconds_left < 20 * 60 and self.random.random() < 0.2:
            decision = {"quota": "daily-spend", "decision": "refused"}
            self._count("quota_decisions_total", instance, 1, **decision)

    def _poisson(self, expected: float) -> int:
        count, product, threshold = 0, self.random.random(), math.exp(-expected)
        while product > threshold:
            count, product = count + 1, product * self.random.random()
        return count

    def samples(self, seconds_left: float) -> Iterator[tuple[str, str, float]]:
        """Yield metric, series and value of all running processes."""
        for (name, labels), value in self.values.items():
            if seconds_left < ENDED_SECONDS and ("instance", ENDED) in labels:
                continue
            pairs = ",".join(f'{label}="{text}"' for label, text in (("job", "agents"), *labels))
            yield name, f"{name}{{{pairs}}}", value


def simulate(end: float, age: int = SHOWN + HISTORY) -> str:
    """Return the samples of a fleet of an age in seconds, in the OpenMetrics format."""
    fleet = Fleet(end)
    lines: dict[str, list[str]] = {}
    for left in scrapes(age):
        for name, series, value in fleet.samples(left):
            lines.setdefault(name, []).append(f"{series} {value:.15g} {end - left:.0f}")
        fleet.advance(left, HISTORY_INTERVAL if left > SHOWN + HOUR else INTERVAL)
    return "\n".join((*(line for samples in lines.values() for line in samples), "# EOF", ""))


def scrapes(age: int) -> Iterator[int]:
    """Yield how long before the end each scrape is: rarely at first, as few see those."""
    yield from range(age, SHOWN + HOUR, -HISTORY_INTERVAL)
    yield from range(min(age, SHOWN + HOUR), -1, -INTERVAL)


def write() -> None:
    """Draw all pictures."""
    out = ROOT / "dashboards/pictures"
    for path in out.glob("*.png"):
        path.unlink()
    # At a full multiple of all steps, the first bars begin with the shown time.
    now = time.time() // LONG_STEP * LONG_STEP
    window = TimeRange(start=now - SHOWN, end=now, step=SHOWN / POINTS, scrape_interval=INTERVAL)
    samples = simulate(now)
    with (
        tempfile.TemporaryDirectory() as directory,
        remembering(Path(directory), samples) as url,
    ):
        without_data = draw_all(Prometheus(url), window, out)
    assert not without_data, without_data
    for path in out.glob("*.png"):
        # A palette makes a third of the size.
        Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)


if __name__ == "__main__":
    write()
