"""Exports of a forked process: its own counts, and none of its parent's again."""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.metrics.export import ConsoleMetricExporter

from otel_limits.otel import export
from otel_limits.otel.export import OwnMeters, OwnReader
from tests.otlp.receiver import Received, http_receiver
from tests.programs.otlp.test_otlp import PROGRAM, attributes, bare_environment

if TYPE_CHECKING:
    import pytest

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
        for resource in getattr(request, "resource_metrics", ()):
            process = attributes(resource.resource)["service.instance.id"]
            for metric in (each for scope in resource.scope_metrics for each in scope.metrics):
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
