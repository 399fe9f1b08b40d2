"""OTLP exports of a process, and its behavior when the endpoint is down."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from otel_limits.observers.instruments import INVOCATION_TURNS
from otel_limits.otel.provider import resource
from tests.dashboards.servers import until
from tests.otlp.receiver import Received, grpc_receiver, http_receiver
from tests.paths import SCRIPTS
from tests.processes import bounded, free_port

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
