"""OTLP exports of a process and of its forks, and its behavior when the endpoint is down."""

from __future__ import annotations

import io
import os
import queue
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter

from otel_limits.observers.metrics import INVOCATION_TURNS
from otel_limits.observers.otlp_observer import FLUSH_INTERVAL_SECONDS, OtlpObserver
from otel_limits.otel import export
from otel_limits.otel.export import OwnMeters, OwnReader
from otel_limits.otel.provider import resource
from tests.clock import Clock
from tests.dashboards.servers import until
from tests.otlp.receiver import Received, grpc_receiver, http_receiver
from tests.paths import SCRIPTS
from tests.processes import bounded, free_port
from tests.unit.observers.test_counting import INVOCATION, STARTED

APP = SCRIPTS / "exporting_app.py"
LATE_PROVIDER = SCRIPTS / "late_provider.py"
PROGRAM = str(Path(sys.executable).with_name("otel-limits"))
CAP = 3
LIMITED = (PROGRAM, "run", "--max-turns", str(CAP), "--", sys.executable, str(APP))

RECEIVERS = {"grpc": grpc_receiver, "http/protobuf": http_receiver}


@dataclass(frozen=True)
class Ended:
    """How the application ended."""

    stop_reason: str
    model_calls: int
    exit_seconds: float
    log: str


def bare_environment(**variables: str) -> dict[str, str]:
    """Make the environment of a shell without anything but directories for files."""
    places = {name: os.environ[name] for name in ("TMPDIR", "XDG_DATA_HOME")}
    return {"PATH": "/usr/bin:/bin", **places, **variables}


def execute(**environ: str) -> Ended:
    """Run the application under `otel-limits run`, with nothing but these variables."""
    done = subprocess.run(
        LIMITED,
        env=bare_environment(**environ),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    reason, calls, delay = done.stdout.split()
    return Ended(reason, int(calls), float(delay), done.stderr)


def over(protocol: str, received: Received) -> AbstractContextManager[str]:
    """Start a receiver for a protocol; gives its endpoint."""
    return RECEIVERS[protocol](received)


@pytest.fixture(scope="module", params=RECEIVERS)
def received(request: pytest.FixtureRequest) -> Iterator[Received]:
    """The exports of one run of the application."""
    received = Received()
    with over(request.param, received) as endpoint:
        ended = execute(
            OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_EXPORTER_OTLP_PROTOCOL=request.param
        )
        assert (ended.stop_reason, ended.model_calls) == ("max_turns", CAP)
        yield received


def attributes(holder: Any) -> dict[str, Any]:
    """Attributes of a span, an event, a point or a resource, as plain values."""
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in holder.attributes
    }


HALT = {
    "otel_limits.stop.reason": "max_turns",
    "otel_limits.stop.action": "halted",
    "otel_limits.limit.name": "max_turns",
    "otel_limits.limit.value": CAP,
    "otel_limits.limit.consumed": CAP,
}


def test_agent_span_has_the_halt(received: Received) -> None:
    """Its attributes are those of the halt, and its status is not an error."""
    (span,) = [each for each in received.spans if each.name.startswith("invoke_agent")]

    assert attributes(span).items() >= HALT.items()
    assert attributes(span)["otel_limits.message.synthetic"] is True
    assert span.status.code != 2
    assert [each.name for each in span.events].count("otel_limits.halt") == 1


def test_the_halt_is_an_event_of_its_own(received: Received) -> None:
    """A log record with the name of the event, tied to the agent's span."""
    (event,) = received.logs
    (span,) = [each for each in received.spans if each.name.startswith("invoke_agent")]

    assert event.event_name == "otel_limits.halt"
    assert event.severity_text == "WARN"
    assert attributes(event).items() >= {**HALT, "gen_ai.agent.name": "researcher"}.items()
    assert (event.trace_id, event.span_id) == (span.trace_id, span.span_id)


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("otel_limits.stops", {"reason": "max_turns", "action": "halted"}, 1),
        ("otel_limits.stops", {"reason": "end_turn", "action": "none"}, 0),
        ("otel_limits.turns", {}, CAP),
        ("otel_limits.tokens", {"model": "scripted", "type": "input"}, 10 * CAP),
        ("otel_limits.tool_calls", {"tool": "search", "status": "success"}, CAP),
        ("otel_limits.invocations_in_progress", {}, 0),
        ("otel_limits.limit", {"limit": "max_turns"}, CAP),
    ],
)
def test_a_metric_arrives(
    received: Received, name: str, labels: dict[str, str], expected: float
) -> None:
    """Each with the labels of the table, also those that are still 0."""
    wanted = {"agent": "researcher", **labels}
    metric = received.metrics[name]
    points = getattr(metric, metric.WhichOneof("data")).data_points
    values = [each.as_int or each.as_double for each in points if attributes(each) == wanted]

    assert values == [expected]


def test_a_histogram_arrives_with_the_bounds_of_the_table(received: Received) -> None:
    """And with an exemplar that leads to the trace."""
    (point,) = received.metrics["otel_limits.invocation_turns"].histogram.data_points
    (span,) = [each for each in received.spans if each.name.startswith("invoke_agent")]

    assert tuple(point.explicit_bounds) == INVOCATION_TURNS.buckets
    assert (point.count, point.sum) == (1, CAP)
    assert [each.trace_id for each in point.exemplars] == [span.trace_id]


def test_the_process_has_an_id(received: Received) -> None:
    """Prometheus makes the label `instance` of it, by which dashboards select."""
    assert {attributes(each)["service.instance.id"] for each in received.resources}
    assert len({str(attributes(each)) for each in received.resources}) == 1


def test_fixed_instance_id_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It continues the series of the process before; by default, each process has its own."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=pod-1")
    assert resource.__wrapped__().attributes["service.instance.id"] == "pod-1"


def test_zeros_arrive_before_anything_is_counted() -> None:
    """While the first tool runs, long before the next export: what comes then is an increase."""
    received = Received()
    with http_receiver(received) as endpoint:
        process = subprocess.Popen(
            [*LIMITED, "--wait"],
            env=bare_environment(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with bounded(process):
            assert until(lambda: "otel_limits.stops" in received.metrics, "zeros arrive")
            points = received.metrics["otel_limits.stops"].sum.data_points
            first = {attributes(each)["reason"]: each.as_int or each.as_double for each in points}
            process.communicate("\n" * CAP)
        points = received.metrics["otel_limits.stops"].sum.data_points
        last = {attributes(each)["reason"]: each.as_int or each.as_double for each in points}
    assert (first["max_turns"], first["end_turn"], set(first.values())) == (0, 0, {0})
    assert last["max_turns"] == 1


def test_resource_names_the_service() -> None:
    """As Prometheus' `target_info`, and on `otel_limits_build_info`, where it is scraped too."""
    received = Received()
    said = "deployment.environment=prod,service.version=7,service.namespace=shop"
    with http_receiver(received) as endpoint:
        execute(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_RESOURCE_ATTRIBUTES=said)
    (point,) = received.metrics["otel_limits.build_info"].gauge.data_points

    assert all(
        attributes(each).items() >= dict(pair.split("=") for pair in said.split(",")).items()
        for each in received.resources
    )
    assert (
        attributes(point).items()
        >= {
            "deployment_environment": "prod",
            "service_version": "7",
            "service_namespace": "shop",
        }.items()
    )


def test_each_span_is_sent_once_if_the_program_sets_an_exporting_provider_later() -> None:
    """By the provider that started it: ours, and the program's from then on."""
    received = Received()
    with http_receiver(received) as endpoint:
        done = subprocess.run(
            [*LIMITED[:-1], str(LATE_PROVIDER)],
            env=bare_environment(
                OTEL_EXPORTER_OTLP_ENDPOINT=endpoint,
                OTEL_METRICS_EXPORTER="none",
                OTEL_LOGS_EXPORTER="none",
            ),
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        )
    assert "Overriding" not in done.stderr
    assert len({span.span_id for span in received.spans}) == len(received.spans)
    names: dict[bytes, list[str]] = {}
    for span in received.spans:
        names.setdefault(span.trace_id, []).append(span.name)
    first, second = names.values()
    assert sorted(first) == sorted(second)
    services = [attributes(each)["service.name"] for each in received.resources]
    assert services.count("own") == len(services) - 1 == 1


# --- endpoints that take nothing ------------------------------------------------------------------

TIMEOUT_SECONDS = 4.0


@contextmanager
def closed_port() -> Iterator[str]:
    """Give an endpoint that is not there."""
    with socket.socket() as silent:  # bound but not listening, so the port stays closed
        silent.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{silent.getsockname()[1]}"


@pytest.fixture(scope="module")
def at_bad_endpoints() -> dict[tuple[str, str], Future[Ended]]:
    """The end of the application at each of them, concurrently, as most of it is waiting.

    All of its signals hang, or some are refused and the others have no endpoint at all.
    """
    variables: dict[tuple[str, str], dict[str, str]] = {}
    with ExitStack() as stack:
        dead = stack.enter_context(closed_port())
        for protocol in RECEIVERS:
            hanging = stack.enter_context(over(protocol, Received("hanging")))
            refusing = stack.enter_context(over(protocol, Received("refusing")))
            variables[protocol, "hanging"] = {"OTEL_EXPORTER_OTLP_ENDPOINT": hanging}
            variables[protocol, "refusing or dead"] = {
                "OTEL_EXPORTER_OTLP_ENDPOINT": refusing,
                "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": dead,
            }
        pool = stack.enter_context(ThreadPoolExecutor(len(variables)))
        return {
            (protocol, behaviour): pool.submit(
                execute,
                OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
                OTEL_EXPORTER_OTLP_TIMEOUT=str(TIMEOUT_SECONDS),
                **endpoints,
            )
            for (protocol, behaviour), endpoints in variables.items()
        }


@pytest.mark.parametrize("behaviour", ["hanging", "refusing or dead"])
@pytest.mark.parametrize("protocol", RECEIVERS)
def test_a_bad_endpoint_changes_no_decision(
    at_bad_endpoints: dict[tuple[str, str], Future[Ended]], protocol: str, behaviour: str
) -> None:
    """The cap holds, and three signals together delay the exit by no more than one timeout."""
    ended = at_bad_endpoints[protocol, behaviour].result()

    assert (ended.stop_reason, ended.model_calls) == ("max_turns", CAP)
    # Two of them, one after the other, would take as long as that; the rest is for a busy machine.
    assert ended.exit_seconds < 2 * TIMEOUT_SECONDS


def test_a_signal_that_is_switched_off_is_not_sent() -> None:
    """The variables of OpenTelemetry decide for each signal."""
    received = Received()
    with http_receiver(received) as endpoint:
        execute(
            OTEL_EXPORTER_OTLP_ENDPOINT=endpoint,
            OTEL_METRICS_EXPORTER="none",
            OTEL_LOGS_EXPORTER="none",
        )

    assert received.spans
    assert not received.metrics
    assert not received.logs


def test_metrics_are_not_sent_where_they_are_scraped() -> None:
    """Or a Prometheus that has both ways would count everything twice."""
    received = Received()
    with http_receiver(received) as endpoint:
        execute(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_LIMITS_PROMETHEUS_PORT=str(free_port()))

    assert received.spans
    assert received.logs
    assert not received.metrics


# --- zeros before the first count -----------------------------------------------------------------


class Exports:
    """Counts the exports that an observer asks for."""

    def __init__(self) -> None:
        self.times: queue.Queue[float] = queue.Queue()
        self.observer = OtlpObserver(MeterProvider().get_meter("otel_limits"), flush=self.flush)

    def flush(self) -> None:
        """Export."""
        self.times.put(time.monotonic())

    def begin(self, *agents: str) -> None:
        """Publish an invocation of each of these agents."""
        for agent in agents:
            invocation = replace(INVOCATION, agent=agent, id=f"{agent} {time.monotonic_ns()}")
            self.observer(replace(STARTED, invocation=invocation))


def exporting() -> list[threading.Thread]:
    """The threads that export."""
    return [each for each in threading.enumerate() if each.name == "otel-limits-zeros"]


def test_zeros_are_exported_when_an_agent_is_first_seen() -> None:
    """Immediately and in the background, and only once per agent."""
    exports = Exports()
    exports.begin("research")
    exports.times.get(timeout=20)
    for thread in exporting():
        thread.join()
    exports.begin("research", "research")
    assert exporting() == []
    assert exports.times.empty()


def test_a_flood_of_agents_is_one_export_a_second() -> None:
    """The second export comes a second after the first, and has everything published between."""
    exports, begin = Exports(), time.monotonic()
    exports.begin("first")
    exports.times.get(timeout=20)
    exports.begin(*(f"agent {number}" for number in range(40)))
    again = exports.times.get(timeout=20)
    assert again - begin >= FLUSH_INTERVAL_SECONDS
    assert exports.times.empty()


def test_agent_does_not_wait_for_the_network() -> None:
    """An export that hangs keeps no invocation from beginning."""
    hanging, asked = threading.Event(), threading.Event()

    def hang() -> None:
        asked.set()
        hanging.wait(60)

    meter = MeterProvider().get_meter("otel_limits")
    observer = OtlpObserver(meter, flush=hang)
    observer(STARTED)
    assert asked.wait(20)
    observer(replace(STARTED, invocation=replace(INVOCATION, agent="other", id="i2")))
    hanging.set()


def test_a_forked_child_exports_its_own_zeros() -> None:
    """Also where the parent was about to export: the thread that would is not in the child."""
    exports = Exports()
    exports.begin("first")
    exports.times.get(timeout=20)
    exports.begin("second")  # exported a second later
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this tests forking with threads
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        exports.observer.after_fork()
        exports.begin("research")
        exports.times.get()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    exports.times.get(timeout=20)


def test_a_forked_child_does_not_wait_for_the_second_of_its_parent() -> None:
    """Its parent has just exported; the child's first export contains only its own counts."""
    exports = Exports()
    exports.begin("research")
    exports.times.get(timeout=20)
    with Clock() as clock:
        exports.observer.after_fork()
        exports.begin("other")
        exports.times.get(timeout=20)
        assert clock() < FLUSH_INTERVAL_SECONDS / 2


# --- a forked process -----------------------------------------------------------------------------

BEFORE, AFTER, OF_THE_CHILD = 2, 1, 3

FORKING = f"""
import os
from prometheus_client import REGISTRY
from strands import Agent, tool
from otel_limits.testing import ScriptedModel, endless, uses

@tool
def look() -> str:
    "Look."
    return "nothing"

def halt(times):
    for _ in range(times):
        model = ScriptedModel(endless(uses("look")))
        Agent(model=model, tools=[look], name="worker", callback_handler=None)("go")

def counted():
    labels = {{"agent": "worker", "reason": "max_turns", "action": "halted"}}
    print(REGISTRY.get_sample_value("otel_limits_stops_total", labels), flush=True)
    print(sum(
        sample.value for family in REGISTRY.collect() for sample in family.samples
        if sample.name == "gen_ai_client_operation_duration_seconds_count"
    ))

halt({BEFORE})
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
    halt({AFTER})
else:
    counted()
    halt({OF_THE_CHILD})
counted()
"""


class LastExports(Received):
    """The last export of each process, by its ID."""

    def __init__(self) -> None:
        """Begin with nothing."""
        super().__init__()
        self.halts: dict[str, int] = {}
        self.gauges: dict[str, set[str]] = defaultdict(set)

    def receive(self, request: Any) -> None:
        """Keep the halts, and which gauges there are."""
        for each in getattr(request, "resource_metrics", ()):
            process = attributes(each.resource)["service.instance.id"]
            for metric in (metric for scope in each.scope_metrics for metric in scope.metrics):
                if metric.HasField("gauge"):
                    self.gauges[process].add(metric.name)
                for point in metric.sum.data_points if metric.name == "otel_limits.stops" else ():
                    if attributes(point)["reason"] == "max_turns":
                        self.halts[process] = int(point.as_int or point.as_double)


def test_forked_process_exports_its_own_counts() -> None:
    """Over OTLP and in its registry; what holds in its parent, such as a limit, holds in it."""
    told = LastExports()
    with http_receiver(told) as endpoint:
        done = subprocess.run(
            [PROGRAM, "run", "--max-turns", "1", "--", sys.executable, "-W", "ignore", "-c",
             textwrap.dedent(FORKING)],
            env=bare_environment(
                OTEL_EXPORTER_OTLP_ENDPOINT=endpoint,
                OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf",
                OTEL_LIMITS_METRICS="prometheus,otlp",
                OTEL_LIMITS_GENAI_METRICS="true",
            ),
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(told.halts.values()) == sorted([BEFORE + AFTER, OF_THE_CHILD])
    of_parent, of_child = told.gauges.values()
    assert of_parent == of_child >= {"otel_limits.limit", "otel_limits.enforcing"}
    in_registry = [float(each) for each in done.stdout.split()]
    # Halts, and model calls by the conventions: each halt came after one.
    assert in_registry == [
        each for count in (0, OF_THE_CHILD, BEFORE + AFTER) for each in (count, count)
    ]


def test_the_reader_of_the_parent_exports_nothing_in_the_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The SDK starts it again there, and what it would say of the parent is of the past."""
    said = io.StringIO()
    readers: list[OwnReader] = []

    def make_reader(exporter: Any) -> OwnReader:
        readers.append(OwnReader(exporter))
        return readers[-1]

    monkeypatch.setattr(export, "OwnReader", make_reader)
    own = OwnMeters(ConsoleMetricExporter(out=said))
    own.get_meter("otel_limits").create_counter("halts").add(BEFORE)
    (of_parent,) = readers
    own.reset_after_fork()
    of_parent.collect()
    assert said.getvalue() == ""
    own.get_meter("otel_limits").create_counter("halts").add(OF_THE_CHILD)
    own.force_flush()
    assert f'"value": {OF_THE_CHILD}' in said.getvalue()
    of_parent.shutdown()
    own.shutdown()
