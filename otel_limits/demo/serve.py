"""`otel-limits demo --serve`: a fleet of scripted agents that runs until Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import shlex
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import baggage, context, trace

from otel_limits.bindings.recognition import release
from otel_limits.bindings.script import Answer, ScriptedRun, fails, says, uses
from otel_limits.demo.sample_fleet import (
    AGENTS,
    DATA,
    FLEET,
    INCIDENTS,
    SATURDAY,
    TENANT,
    WEEKS,
    Agent,
    Incident,
    Plan,
    as_file,
    draw_tool,
    draw_usage,
    limits_json,
    plan_invocation,
    prices_json,
    seconds_of_call,
)
from otel_limits.otel.provider import FallbackProvider, set_fallback
from otel_limits.runs.registry import kill
from otel_limits.runtime.runtime import RUNTIME
from otel_limits.settings.policy.file import PolicyFile
from otel_limits.settings.settings_reader import read_settings, settings_with
from otel_limits.settings.variables import reachable

if TYPE_CHECKING:
    from types import FrameType

    from otel_limits.bindings.framework import Framework
    from otel_limits.core.usage import Usage


# --- the server -----------------------------------------------------------------------------------

DEFAULT_PORT: Final = 9464
FAILED: Final = 1
BAD_ARGUMENT: Final = 2

SCRAPE_CONFIG: Final = """\
scrape_configs:
  - job_name: otel-limits-demo
    scrape_interval: 15s
    static_configs: [{{targets: ["{address}"]}}]
"""

RULES: Final = """\
# Alerts, once `otel-limits dashboards export dashboards` has written them.
rule_files: [dashboards/prometheus/rule*.yaml, dashboards/prometheus/threshold*.yaml]
global: {evaluation_interval: 15s}
"""

TEXT: Final = """\
{agents} agents of {release} run until Ctrl-C. Their models are scripted; the spend is simulated.
A day of their work takes a minute. {burning} burns money: its action is observe, not halt.
Limits, prices and quotas are in limits.yaml. It can be edited while they run.

In another terminal:
{activate}  cd {directory}
  otel-limits top --scrape http://{address}/metrics
  otel-limits audit spend --by agent --ledger ledger.db
  otel-limits dashboards export dashboards   # import grafana/dashboards/*.json into Grafana
  # Alerts at http://localhost:9090/alerts:
  prometheus --config.file=prometheus.yaml --storage.tsdb.path=./prometheus-data

For a Prometheus that already runs on this machine:
{scrape}
Halts and would-be halts:
"""


def serve(framework: Framework, port: int) -> int:
    """Run the fleet until SIGINT or SIGTERM.

    Args:
        framework: An installed framework.
        port: Where /metrics is served, on the address of `OTEL_LIMITS_PROMETHEUS_HOST`.

    Returns:
        The exit status: 2 if the port is taken.
    """
    host = settings_with("prometheus_host").prometheus_host
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        return refuse(f"Cannot serve metrics on {host}:{port}: {_why(error, port)}")
    address = f"{reachable(host)}:{port}"
    scrape = SCRAPE_CONFIG.format(address=address)
    try:
        directory = make_directory(scrape)
    except OSError as error:
        return refuse(f"Cannot write a temporary directory: {error.strerror}. Set TMPDIR.")
    try:
        import_module(framework.module)
    except ImportError as error:
        return refuse(str(error), FAILED)
    fleet = LiveFleet(framework)
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        start(directory, host, port)
        text = TEXT.format(
            agents=len(AGENTS),
            release=release(framework),
            burning=" and ".join(BURNING),
            activate=_activation(),
            directory=directory,
            address=address,
            scrape=scrape,
        )
        sys.stdout.write(text)
        sys.stdout.flush()
        fleet.start()
        threading.Event().wait()
    except KeyboardInterrupt:
        sys.stdout.write(f"\nStopped. The ledger is still in {directory}.\n")
    finally:
        fleet.stop()
        RUNTIME.stop()
        signal.signal(signal.SIGTERM, before)
    return 0


def refuse(sentence: str, status: int = BAD_ARGUMENT) -> int:
    """Print why the fleet does not run; return the exit status."""
    sys.stderr.write(f"otel-limits demo: {sentence}\n")
    return status


def _activation() -> str:
    """Return the line that makes `otel-limits` a command in a new terminal, if one is needed."""
    script = Path(sys.prefix) / "bin" / "activate"
    is_needed = sys.prefix != sys.base_prefix and script.exists()
    return f"  . {shlex.quote(str(script))}\n" if is_needed else ""


def make_directory(scrape: str) -> Path:
    """Create the directory of the ledger, with the policy and Prometheus' configuration.

    Raises:
        OSError: It cannot be written.
    """
    directory = Path(tempfile.mkdtemp(prefix="otel-limits-demo-"))
    (directory / "prometheus.yaml").write_text(RULES + scrape, encoding="utf-8")
    (directory / "limits.yaml").write_text(as_file(live_policy()), encoding="utf-8")
    return directory


def start(directory: Path, host: str, port: int) -> None:
    """Enforce the limits of the fleet, and only the listen address of this process."""
    # Autoload may have enabled this process, with the user's ledger and exporters.
    RUNTIME.stop()
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logging.getLogger("otel_limits").addHandler(handler)
    # Those of the framework report errors that the fleet is meant to have.
    logging.getLogger().addHandler(logging.NullHandler())
    policy = str(directory / "limits.yaml")
    settings = read_settings(
        {
            "OTEL_LIMITS_POLICY": policy,
            "OTEL_LIMITS_LEDGER": str(directory / "ledger.db"),
            "OTEL_LIMITS_PROMETHEUS_HOST": host,
            "OTEL_LIMITS_PROMETHEUS_PORT": str(port),
            "OTEL_LIMITS_AUDIT_KEYS": TENANT,
            "OTEL_LIMITS_QUIET": "true",
        }
    ).settings
    RUNTIME.start(settings, policy_file=PolicyFile(policy))
    if type(trace.get_tracer_provider()) is trace.ProxyTracerProvider:
        # Exports nothing. Without it, all spans of the fleet would be reported as missing.
        set_fallback(FallbackProvider())


def _why(error: OSError, port: int) -> str:
    """Describe why a port cannot be bound, and the fix."""
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        # Without the address that Python adds.
        return f"{os.strerror(error.errno)}. Choose another port, e.g. --serve {port + 1}."
    return "no address of this machine. Set OTEL_LIMITS_PROMETHEUS_HOST, e.g. to 0.0.0.0."


def interrupt(_: int, __: FrameType | None) -> None:
    """End the wait as Ctrl-C does."""
    raise KeyboardInterrupt


# --- real agents with scripted models: a day takes a minute ---------------------------------------

DAY_SECONDS: Final = 60.0
DAYS_OF_WEEK: Final = 7
LONGEST_STOP_SECONDS: Final = 10.0
BURNING: Final = {
    agent: incident for (agent, *_), incident in INCIDENTS.items() if incident.action == "observed"
}
"""Agents that are always stuck, as their limits are only observed."""


def live_policy() -> dict[str, Any]:
    """Return the policy of the fleet: limits, prices and quotas."""
    live = DATA["live"]
    agents: dict[str, Any] = {
        agent.name: {"limits": limits_json(agent.limits)}
        | ({"action": "observe"} if agent.name in BURNING else {})
        for agent in AGENTS.values()
    }
    return {
        "agents": agents | live["agents"],
        "models": prices_json(),
        "quotas": live["quotas"],
    }


def usage_json(usage: Usage) -> dict[str, int]:
    """Return the usage that a model reports, with the names of `Answer.usage`."""
    cached = {"cacheReadInputTokens": usage.cache_read, "cacheWriteInputTokens": usage.cache_write}
    return {
        "inputTokens": usage.input,
        "outputTokens": usage.output,
        "totalTokens": usage.total,
        **{name: count for name, count in cached.items() if count},
    }


class FleetError(Exception):
    """An error of a tool or of a provider in the sample fleet."""


class LiveFleet:
    """The agents of the sample fleet, each in its own thread.

    Args:
        framework: Whose agents they are.
    """

    def __init__(self, framework: Framework) -> None:
        """Create the fleet; nothing runs before `start`."""
        self.framework = framework
        self.stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(agent, worker), daemon=True)
            for agent in FLEET
            for worker in range(DATA["live"]["workers"] if agent.name in BURNING else 1)
        ]

    def start(self) -> None:
        """Start the agents."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let each agent answer immediately, and wait for all of them."""
        self.stopping.set()
        end = time.monotonic() + LONGEST_STOP_SECONDS
        for thread in self._threads:
            if thread.is_alive():  # not if it was interrupted before all were started
                thread.join(max(0.0, end - time.monotonic()))

    def _work(self, agent: Agent, worker: int) -> None:
        """Call an agent again and again until the fleet stops."""
        chance = Random(f"{agent.name} {worker}")  # noqa: S311  an example, not a secret
        next_at = time.monotonic()
        for plan, seconds in plans_of(agent, chance):
            if plan is not None:
                self.call(plan, chance)
            # An invocation may take longer than the time until the next one.
            next_at = max(next_at + seconds, time.monotonic())
            if self.stopping.wait(next_at - time.monotonic()):
                return

    def call(self, plan: Plan, chance: Random) -> None:
        """Call an agent for a tenant."""
        token = context.attach(baggage.set_baggage(TENANT, plan.tenant))
        try:
            # The framework may raise an error of the provider as another one.
            with contextlib.suppress(Exception):
                LiveInvocation(plan, chance, self).run()
        finally:
            context.detach(token)


def plans_of(agent: Agent, chance: Random) -> Iterator[tuple[Plan | None, float]]:
    """Yield the invocations of an agent, each with the seconds until the next one, forever.

    It begins with the day of the agent's first incident, as users do not watch for long.
    """
    days = (
        DAYS_OF_WEEK * week + weekday for name, week, weekday in INCIDENTS if name == agent.name
    )
    for day in itertools.count(min(days, default=0)):
        when = day // DAYS_OF_WEEK % WEEKS, day % DAYS_OF_WEEK
        planned = agent.weekend if when[1] >= SATURDAY else agent.weekday
        if not planned:
            yield None, DAY_SECONDS
        for number in range(planned):
            incident = INCIDENTS.get((agent.name, *when)) if number == 0 else None
            incident = BURNING.get(agent.name, incident)
            yield plan_invocation(agent, 0.0, chance, when, incident), DAY_SECONDS / planned


@dataclass(slots=True)
class LiveInvocation:
    """An invocation that follows a plan, unless it is halted."""

    plan: Plan
    chance: Random
    fleet: LiveFleet
    sub_agents: Iterator[Plan] = field(init=False)
    tool_seconds: float = 0.0
    is_failing: bool = False
    """Whether the next tool call fails."""

    def __post_init__(self) -> None:
        """Begin with the first sub-agent."""
        self.sub_agents = iter(self.plan.sub_agents)

    def run(self) -> None:
        """Run the agent."""
        agent = self.plan.agent
        self.fleet.framework.run_script(
            ScriptedRun(
                agent=agent.name,
                script=self.answers(),
                tools=dict.fromkeys(agent.tools, self.use_tool),
                model=agent.model.name,
            )
        )

    def answers(self) -> Iterator[Answer]:
        """Yield the answers of the model, each after the time that it takes."""
        incident, last = self.plan.incident, 0
        for turn in range(1, self.plan.turns + 1):
            usage = draw_usage(self.plan.agent, turn, last, self.chance)
            last = usage.input
            if self.fleet.stopping.wait(seconds_of_call(usage)):
                break
            reported = usage_json(usage)
            if turn == self.plan.turns and not (incident and incident.is_stuck):
                yield self.last_answer(incident, reported)
                return
            tool = draw_tool(self.plan, self.chance)
            self.tool_seconds, self.is_failing = tool.seconds, tool.status == "error"
            arguments = {"query": "" if tool.is_again else str(turn)}
            yield uses(tool.tool, arguments=arguments, usage=reported)
        if incident and incident.reason == "error" and not self.fleet.stopping.is_set():
            yield fails(FleetError("The prompt is too long."))
        yield says("Stopped.")

    def last_answer(self, incident: Incident | None, reported: Mapping[str, int]) -> Answer:
        """Return the answer after which an agent that is not stuck ends."""
        reason = incident.reason if incident else ""
        if reason == "killed":
            kill(agent=self.plan.agent.name)
        if reason == "error":
            return fails(FleetError("The provider is overloaded."))
        return says(
            "Done.", usage=reported, stop_reason="max_tokens" if reason == "max_tokens" else None
        )

    def use_tool(self) -> str:
        """Run a sub-agent, or take the time of a tool."""
        plan = next(self.sub_agents, None)
        if plan is not None:
            LiveInvocation(plan, self.chance, self.fleet).run()
        elif not self.fleet.stopping.wait(self.tool_seconds) and self.is_failing:
            raise FleetError("The tool has failed.")
        return "Nothing new."
