"""Runs the demo's scenarios, each in a program of its own, and gathers the events."""

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

from otel_limits.bindings.messages import is_synthetic
from otel_limits.cli.launch import environment_for
from otel_limits.core.messages import MARKER
from otel_limits.demo.server import CACHE, JOB, Seen, Servers
from otel_limits.settings.variables import environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

AGENT_PROGRAM: Final = ("-m", "otel_limits.demo.agent")
WATCH_PROMPT: Final = f"Tell me when the job {JOB} is done."
CACHE_PROMPT: Final = "How long does a nightly report take, usually?"
MOST_CALLS: Final = 35
"""How often one agent may ask the model, whether its looks at the job succeed or not.

Three scenarios have no cap on turns and one has six, so a real model is asked 111 times at most.
"""

METRIC_PREFIX: Final = "otel_limits_"
SCRAPE_SECONDS: Final = 10.0
EXCEPTION: Final = re.compile(r"[\w.]+(Error|Exception): ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run of the agent: all that differs is the environment."""

    name: str
    variables: Mapping[str, str]
    ends_with: str
    """The stop reason that it is meant to show."""
    asks_cache: bool = False
    """Whether the same program makes a real zero-token call afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the scenarios have in common."""

    base_url: str | None
    """A real model server, or `None` for the built-in one."""
    model: str
    pending_looks: int
    """How often the job is found pending before the demo lets it be done."""
    api_key: str | None = None
    """What a real model server wants to see."""
    scenarios: tuple[Scenario, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """How one invocation of an agent ended."""

    stop_reason: str
    message: Mapping[str, Any]
    """The last message of the conversation."""
    usage: Mapping[str, int]
    """Tokens as the framework counted them."""
    out_of_calls: bool
    """Whether the demo ended it, as it had asked the model often enough."""

    @property
    def synthetic(self) -> bool:
        """Whether the last message comes from a halt."""
        return is_synthetic(self.message)

    @property
    def halt(self) -> Mapping[str, Any] | None:
        """What the halt left in the message, if there was one."""
        # Through the message alone, as a program would that only has the conversation.
        custom = self.message.get("metadata", {}).get("custom", {})
        halt: Mapping[str, Any] | None = custom.get(MARKER)
        return halt


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioOutcome:
    """The events of one scenario."""

    scenario: Scenario
    errand: Errand
    cached: Errand | None
    """The zero-token call that the same program made afterwards."""
    seen: Seen
    bounded: bool
    """Whether the demo ended what would have gone on: the job was done, or no call was left."""
    metrics_url: str
    metrics: Mapping[str, float]
    """Every sample of ours that was scraped."""
    log: tuple[str, ...]
    """What the program wrote to standard error."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """The lines about a limit that was reached."""
        return tuple(line for line in self.log if " halted by " in line)

    @property
    def model_calls(self) -> int:
        """Requests to the model, by /metrics; the zero-token call belongs to another agent."""
        # By /metrics and not by the server: what is shown is what otel-limits has counted.
        return round(self.total("otel_limits_model_calls_total"))

    @property
    def tokens(self) -> int:
        """Tokens, by /metrics."""
        return round(self.total("otel_limits_tokens_total"))

    def total(self, metric: str, **labels: str) -> float:
        """Sum a metric over this agent's series that have these labels."""
        wanted = [
            f'{name}="{value}"' for name, value in (("agent", self.scenario.name), *labels.items())
        ]
        return sum(
            value
            for series, value in self.metrics.items()
            if series.startswith(f"{metric}{{") and all(each in series for each in wanted)
        )


class AgentFailedError(Exception):
    """The agent's program ended without a result; the message says why."""


class Play:
    """All scenarios at once, each in its own process.

    Args:
        setup: What to play.
        servers: Who the agents talk to.
    """

    def __init__(self, setup: Setup, servers: Servers) -> None:
        """Start nothing yet."""
        self.setup = setup
        self.servers = servers
        self.futures: tuple[Future[ScenarioOutcome], ...] = ()
        """The outcomes, in the order of the scenarios."""
        self._programs: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()
        self._stopped = False
        # All at once: the runs without limits take longest, and nobody wants to wait for four in a
        # row.
        self._pool = ThreadPoolExecutor(max_workers=len(setup.scenarios))

    def __enter__(self) -> Self:
        """Start every program."""
        self.futures = tuple(
            self._pool.submit(self._run, scenario) for scenario in self.setup.scenarios
        )
        return self

    def __exit__(self, *_error: object) -> None:
        """End every program that still runs."""
        with self._lock:
            # Under the lock: a program that starts at this moment would be in no list, and outlive
            # the demo.
            self._stopped = True
            # Killed and not asked: an agent may be waiting for a model that takes minutes.
            for program in self._programs:
                program.kill()
        self._pool.shutdown()

    def _run(self, scenario: Scenario) -> ScenarioOutcome:
        port = free_port()
        url = f"http://127.0.0.1:{port}/metrics"
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            program = self._start(scenario, port, log)
            try:
                errand = self._send(program, log, scenario.name, WATCH_PROMPT)
                # Here and not in the list of scenarios: it has to be the same process, with the
                # same metrics.
                cached = (
                    self._send(program, log, CACHE, CACHE_PROMPT) if scenario.asks_cache else None
                )
                # While the program still runs, since its endpoint goes with it.
                metrics = scrape(url, log)
            finally:
                program.communicate()  # closes its input, which ends it
            seen = self.servers.seen(scenario.name)
            return ScenarioOutcome(
                scenario=scenario,
                errand=errand,
                cached=cached,
                seen=seen,
                bounded=seen.looks > self.setup.pending_looks or errand.out_of_calls,
                metrics_url=url,
                metrics=metrics,
                log=tuple(read_all(log).splitlines()),
            )

    def _start(self, scenario: Scenario, port: int, log: IO[str]) -> subprocess.Popen[str]:
        """Start the agent's program as `otel-limits run` does."""
        variables = {**scenario.variables, "OTEL_LIMITS_PROMETHEUS_PORT": str(port)}
        environ = quiet_environment(environment(), embedded=self.setup.base_url is None)
        # Under the lock, or an interruption in between would leave a program that nobody kills.
        with self._lock:
            if self._stopped:
                raise AgentFailedError("The demo was interrupted.")
            program = subprocess.Popen(  # noqa: S603  our own program
                [sys.executable, *AGENT_PROGRAM, f"{self.servers.url(scenario.name)}/jobs"],
                env=environment_for(environ, variables),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
            )
            self._programs.append(program)
        return program

    def _send(
        self, program: subprocess.Popen[str], log: IO[str], agent: str, prompt: str
    ) -> Errand:
        """Send the program's agent on an errand and wait for the result."""
        assert program.stdin is not None
        assert program.stdout is not None
        errand = {
            "agent": agent,
            "prompt": prompt,
            "most_calls": MOST_CALLS,
            **self._model(agent),
        }
        try:
            program.stdin.write(json.dumps(errand) + "\n")
            program.stdin.flush()
            line = program.stdout.readline()
        # The program has ended already; its log says why, below.
        except BrokenPipeError:
            line = ""
        if not line:
            raise AgentFailedError(f"The agent {agent!r} failed: {reason_of(read_all(log))}")
        return Errand(**json.loads(line))

    def _model(self, agent: str) -> dict[str, str | None]:
        if agent == CACHE:  # ours, which is told no secret
            return {"base_url": self.servers.url(agent), "model": CACHE, "api_key": None}
        base_url = self.setup.base_url or self.servers.url(agent)
        return {"base_url": base_url, "model": self.setup.model, "api_key": self.setup.api_key}


def command_line(variables: Mapping[str, str]) -> str:
    """Write what a user would type for the same effect."""
    assignments = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " ".join([*assignments, "otel-limits run -- python agent.py"])


def quiet_environment(environ: Mapping[str, str], *, embedded: bool) -> dict[str, str]:
    """Take from an environment what would change the demo or reach beyond it.

    The agents send nothing to the user's telemetry, and reach loopback without a proxy.
    """
    # The user's own limits would be in force in the scenario without any.
    kept = {name: value for name, value in environ.items() if not name.startswith("OTEL_")}
    if embedded:
        kept = {n: value for n, value in kept.items() if not n.upper().endswith("_PROXY")}
    loopback = "127.0.0.1,localhost"
    # Both, as libraries disagree about which of the two they read.
    for name in ("NO_PROXY", "no_proxy"):
        kept[name] = f"{kept[name]},{loopback}" if kept.get(name) else loopback
    return kept | {"OTEL_LIMITS_QUIET": "true"}  # the demo says itself what limits its programs


def free_port() -> int:
    """Find a TCP port on loopback that nobody uses."""
    with socket.socket() as probe:
        # Another program may take it before ours does; then the scrape fails with a sentence.
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def scrape(url: str, log: IO[str]) -> dict[str, float]:
    """Read our metrics from an endpoint, as Prometheus does.

    Raises:
        AgentFailedError: Nobody answers there; the log of the program may know why.
    """
    parts = urlsplit(url)
    try:
        # Not urlopen, which would ask the user's proxy for an address on loopback.
        connection = http.client.HTTPConnection(parts.netloc, timeout=SCRAPE_SECONDS)
        connection.request("GET", parts.path)
        text = connection.getresponse().read().decode()
        connection.close()
    except OSError as error:
        raise AgentFailedError(
            f"{url} cannot be scraped ({error}): {reason_of(read_all(log))}"
        ) from error
    # From the right: the value of a label may have spaces in it.
    samples = (line.rpartition(" ") for line in text.splitlines() if line.startswith(METRIC_PREFIX))
    return {series: float(value) for series, _, value in samples if "_created{" not in series}


def read_all(log: IO[str]) -> str:
    """Read a log from its beginning."""
    log.seek(0)
    return log.read()


def reason_of(log: str) -> str:
    """Find the line that says why a program failed: of the last exception, otherwise the last."""
    lines = [line for line in log.splitlines() if line.strip()]
    # The last exception is the outermost one, which says most.
    exceptions = [line for line in lines if EXCEPTION.match(line)]
    return (exceptions or lines or ["it said nothing."])[-1]
