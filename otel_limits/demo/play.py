"""Runs each scenario of the demo in its own process and collects the outcomes."""

from __future__ import annotations

import http.client
import json
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from otel_limits.bindings.known import is_synthetic
from otel_limits.core.stop_json import MARKER
from otel_limits.demo.server import GUARDED, JOB, DemoServers, RequestCounts
from otel_limits.settings.children import environment_for_run
from otel_limits.settings.variables import environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

AGENT: Final = "report-watcher"
AGENT_PROGRAM: Final = ("-m", "otel_limits.demo.agent")
JOB_PROMPT: Final = f"Let me know when the job {JOB} is done."
BLOCKED_PROMPT: Final = "Whom did the nightly report mention?"
MAX_CALLS_PER_RUN: Final = 35
"""Model calls of one agent, whether or not its polls succeed.

Three scenarios have no cap on turns and one has six, so a real model gets at most 111 calls.
"""

METRIC_PREFIX: Final = "otel_limits_"
SCRAPE_SECONDS: Final = 10.0
EXCEPTION: Final = re.compile(r"[\w.]+(Error|Exception): ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run of the agent. Only the environment differs."""

    name: str
    variables: Mapping[str, str]
    ends_with: str
    """The expected stop reason."""
    calls_guarded: bool = False
    """Whether the same process makes a real zero-token call afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Settings shared by all scenarios."""

    base_url: str | None
    """A real model server, or `None` for the built-in one."""
    model: str
    pending_polls: int
    """Polls that return "pending" before the job is done."""
    api_key: str | None = None
    """API key of a real model server."""
    scenarios: tuple[Scenario, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How one invocation of an agent ended."""

    stop_reason: str
    message: Mapping[str, Any]
    """The last message of the conversation."""
    usage: Mapping[str, int]
    """Tokens as the framework counted them."""
    out_of_calls: bool
    """Whether the demo ended it after its maximum number of model calls."""

    @property
    def is_synthetic(self) -> bool:
        """Whether the last message comes from a halt."""
        return is_synthetic(self.message)

    @property
    def halt(self) -> Mapping[str, Any] | None:
        """The details of the halt, if it was halted."""
        # From the message, the only source for a program that has just the conversation.
        custom = self.message.get("metadata", {}).get("custom", {})
        halt: Mapping[str, Any] | None = custom.get(MARKER)
        return halt


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioOutcome:
    """The events of one scenario."""

    scenario: Scenario
    result: RunResult
    blocked: RunResult | None
    """The zero-token call that the same process made afterwards."""
    server_counts: RequestCounts
    ended_by_demo: bool
    """Whether the demo ended a runaway, by finishing the job or refusing another model call."""
    metrics_url: str
    metrics: Mapping[str, float]
    """All scraped samples of otel-limits."""
    log: tuple[str, ...]
    """Lines of the process's standard error."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Log lines about a reached limit."""
        return tuple(line for line in self.log if " max_" in line)

    @property
    def model_calls(self) -> int:
        """Model calls as counted by otel-limits, without the other agent's zero-token call."""
        return round(self.total("otel_limits_model_calls_total"))

    @property
    def tokens(self) -> int:
        """Tokens as counted by otel-limits."""
        return round(self.total("otel_limits_tokens_total"))

    def total(self, metric: str, **labels: str) -> float:
        """Sum a metric over the agent's series with these labels."""
        wanted = [f'{name}="{value}"' for name, value in (("agent", AGENT), *labels.items())]
        return sum(
            value
            for series, value in self.metrics.items()
            if series.startswith(f"{metric}{{") and all(each in series for each in wanted)
        )


class AgentFailedError(Exception):
    """The agent's process ended without a result."""


class DemoRun:
    """Runs all scenarios concurrently, each in its own process.

    Args:
        setup: The scenarios and their model.
        servers: The demo's own servers.
    """

    def __init__(self, setup: Setup, servers: DemoServers) -> None:
        """Create the run without starting it."""
        self.setup = setup
        self.servers = servers
        self.futures: tuple[Future[ScenarioOutcome], ...] = ()
        """The outcomes, in the order of the scenarios."""
        self._programs: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()
        self._stopped = False
        self._pool = ThreadPoolExecutor(max_workers=len(setup.scenarios))

    def __enter__(self) -> Self:
        """Start all processes."""
        self.futures = tuple(
            self._pool.submit(self._run, scenario) for scenario in self.setup.scenarios
        )
        return self

    def __exit__(self, *_error: object) -> None:
        """Kill all processes that are still running."""
        # Under the lock, or a process started concurrently would outlive the demo.
        with self._lock:
            self._stopped = True
            # Not terminated: an agent may be waiting minutes for a model.
            for program in self._programs:
                program.kill()
        self._pool.shutdown()

    def _run(self, scenario: Scenario) -> ScenarioOutcome:
        port = free_port()
        url = f"http://127.0.0.1:{port}/metrics"
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            program = self._start(scenario, port, log)
            try:
                result = self._send(program, log, AGENT, JOB_PROMPT, self._model(scenario.name))
                blocked = None
                if scenario.calls_guarded:  # in the same process, with the same metrics
                    # Never with the API key, which belongs to the real model server.
                    model = {
                        "base_url": self.servers.url(GUARDED),
                        "model": "guarded",
                        "api_key": None,
                    }
                    blocked = self._send(program, log, GUARDED, BLOCKED_PROMPT, model)
                metrics = scrape(url, log)
            finally:
                program.communicate()  # closes its input, which ends it
            counts = self.servers.counts(scenario.name)
            return ScenarioOutcome(
                scenario=scenario,
                result=result,
                blocked=blocked,
                server_counts=counts,
                ended_by_demo=counts.polls > self.setup.pending_polls or result.out_of_calls,
                metrics_url=url,
                metrics=metrics,
                log=tuple(read_all(log).splitlines()),
            )

    def _start(self, scenario: Scenario, port: int, log: IO[str]) -> subprocess.Popen[str]:
        """Start the agent's process as `otel-limits run` does."""
        variables = {**scenario.variables, "OTEL_LIMITS_PROMETHEUS_PORT": str(port)}
        environ = isolated_environment(environment(), embedded=self.setup.base_url is None)
        # Under the lock, or a process started during an interruption would never be killed.
        with self._lock:
            if self._stopped:
                raise AgentFailedError("The demo was interrupted.")
            program = subprocess.Popen(  # noqa: S603  our own program
                [sys.executable, *AGENT_PROGRAM, f"{self.servers.url(scenario.name)}/jobs"],
                env=environment_for_run(environ, variables),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
            )
            self._programs.append(program)
        return program

    def _send(
        self,
        program: subprocess.Popen[str],
        log: IO[str],
        agent: str,
        prompt: str,
        model: Mapping[str, str | None],
    ) -> RunResult:
        """Send a task to a process and wait for the result."""
        assert program.stdin is not None
        assert program.stdout is not None
        task = {"agent": agent, "prompt": prompt, "max_calls": MAX_CALLS_PER_RUN, **model}
        try:
            program.stdin.write(json.dumps(task) + "\n")
            program.stdin.flush()
            line = program.stdout.readline()
        # The process has already ended; the reason is in its log.
        except BrokenPipeError:
            line = ""
        if not line:
            raise AgentFailedError(f"The agent {agent!r} failed: {failure_reason(read_all(log))}")
        return RunResult(**json.loads(line))

    def _model(self, scenario: str) -> dict[str, str | None]:
        base_url = self.setup.base_url or self.servers.url(scenario)
        return {"base_url": base_url, "model": self.setup.model, "api_key": self.setup.api_key}


def command_line(variables: Mapping[str, str]) -> str:
    """Return the equivalent shell command."""
    assignments = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " ".join([*assignments, "otel-limits run -- python agent.py"])


def isolated_environment(environ: Mapping[str, str], *, embedded: bool) -> dict[str, str]:
    """Return an environment without the user's limits, telemetry and, if `embedded`, proxies."""
    kept = {name: value for name, value in environ.items() if not name.startswith("OTEL_")}
    if embedded:
        kept = {n: value for n, value in kept.items() if not n.upper().endswith("_PROXY")}
    loopback = "127.0.0.1,localhost"
    # Libraries disagree about which of the two they read.
    for name in ("NO_PROXY", "no_proxy"):
        kept[name] = f"{kept[name]},{loopback}" if kept.get(name) else loopback
    return kept | {"OTEL_LIMITS_QUIET": "true"}  # the demo prints the limits


def free_port() -> int:
    """Return a free TCP port on loopback.

    Another program may bind it first; then the scrape fails with an error message.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def scrape(url: str, log: IO[str]) -> dict[str, float]:
    """Scrape the otel-limits metrics from an endpoint.

    Raises:
        AgentFailedError: The endpoint is unreachable; the message includes the cause from the log.
    """
    parts = urlsplit(url)
    try:
        # urlopen would use the user's proxy.
        connection = http.client.HTTPConnection(parts.netloc, timeout=SCRAPE_SECONDS)
        connection.request("GET", parts.path)
        text = connection.getresponse().read().decode()
        connection.close()
    except OSError as error:
        raise AgentFailedError(
            f"{url} cannot be scraped ({error}): {failure_reason(read_all(log))}"
        ) from error
    # From the right, because label values may contain spaces.
    samples = (line.rpartition(" ") for line in text.splitlines() if line.startswith(METRIC_PREFIX))
    return {series: float(value) for series, _, value in samples if "_created{" not in series}


def read_all(log: IO[str]) -> str:
    """Read a log from its start."""
    log.seek(0)
    return log.read()


def failure_reason(log: str) -> str:
    """Return the last line with an exception, or else the last line."""
    lines = [line for line in log.splitlines() if line.strip()]
    exceptions = [line for line in lines if EXCEPTION.match(line)]
    return (exceptions or lines or ["no output."])[-1]
