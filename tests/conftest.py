"""Fixtures of every test: a clean process, a real SDK provider, agents with scripted models."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import signal
import tempfile
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from hypothesis import HealthCheck, settings
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY
from sqlalchemy import Connection, Engine, event
from sqlalchemy.dialects.sqlite.base import SQLiteDialect
from sqlalchemy.util import LRUCache
from strands import Agent, tool
from strands.telemetry import tracer as strands_tracer

import otel_limits
from otel_limits.core.internal_errors import INTERNAL_ERRORS
from otel_limits.runs.registry import LIVE
from otel_limits.testing import FakeTime
from tests.cpu import pytest_runtest_makereport, pytest_runtest_setup, pytest_terminal_summary
from tests.launching import link_packages
from tests.rotation import choose_ways, pytest_addoption

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from opentelemetry.context import Context
    from strands.agent import AgentResult
    from strands.models import Model

__all__ = [
    "pytest_addoption",
    "pytest_runtest_makereport",
    "pytest_runtest_setup",
    "pytest_terminal_summary",
]

settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")  # no test fails because others keep the machine busy

# A shell starts what runs in the background without these, and every program of a test inherits it.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Logfire is installed for its tests, and pydantic would load it into every program that imports
# Strands: a third of the time that it takes one to begin.
os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"

# Otherwise `import litellm` asks the network for a list of prices, and warns minutes later, in the
# middle of another test.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"


TESTS = Path(__file__).parent
LONGEST = (
    "unit/agents/test_compositions.py",
    "unit/strands/test_compositions.py",
    "unit/ledger/test_writer.py",
    "programs/ledger/test_writer.py",
    "programs/runtime/test_workers.py",
    "programs/wire/test_wire.py",
    "unit/runtime/test_guard.py",
    "programs/runtime/test_guard.py",
    "programs/cli/test_run_command.py",
    "unit/runs/test_run.py",
    "unit/top/test_fleet.py",
    "servers/quotas/test_fleet.py",
    "programs/runtime/test_autoload.py",
    "programs/runtime/test_launchers.py",
    "unit/strands/test_private.py",
    "servers/quotas/test_round_trips.py",
    "unit/ledger/test_spill.py",
    "programs/ledger/test_spill.py",
    "servers/dashboards/test_pipelines.py",
    "servers/dashboards/test_scene.py",
    "unit/dashboards/test_exported_files.py",
    "servers/dashboards/test_exported_files.py",
    "unit/cli/test_doctor.py",
    "programs/cli/test_doctor.py",
    "servers/cli/test_doctor.py",
    "programs/observers/test_otlp_observer.py",
    "unit/ledger/test_otlp.py",
    "unit/observers/test_prometheus.py",
    "servers/observers/test_prometheus.py",
    "servers/quotas/test_outages.py",
    "unit/ledger/test_rows.py",
    "servers/quotas/test_fleet_commands.py",
    "unit/agents/test_every_limit.py",
    "programs/repository/test_built_wheel.py",
    "servers/quotas/test_restarts.py",
    "programs/runtime/test_enable.py",
    "servers/agents/test_vendor_budgets.py",
    "unit/agents/test_features.py",
)
"""The files that take longest, about 20 seconds of one process or more."""

OBJECTS_PER_COLLECTION = 100_000
"""The garbage collections of Python's own 700 took a fifteenth of the time of all tests."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the longest files first, without the cells of tables that wait for the night.

    One process runs all tests of a file, so a long one at the end would delay the session.
    """
    choose_ways(config, items)
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.relative_to(TESTS).as_posix(), len(LONGEST)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what the test modules have imported out of every garbage collection.

    It is half a million objects that live until the end: looking at them again and again was a
    third of the time that collecting the tests took, and half of what they took themselves.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(OBJECTS_PER_COLLECTION)
        gc.enable()


class Call(Protocol):
    """One way to invoke an agent."""

    def __call__(self, agent: Agent, prompt: Any = "go", **arguments: Any) -> AgentResult:
        """Invoke `agent` and return its result."""


class MakeAgent(Protocol):
    """Makes an agent with the tool `search`."""

    def __call__(self, model: Model, **arguments: Any) -> Agent:
        """Make it; arguments go to `Agent`."""


class Metric(Protocol):
    """Reads one sample of the default registry."""

    def __call__(self, name: str, **labels: str) -> float:
        """Return its value, 0 where there is none."""


class OpenSpans(SpanProcessor):
    """Names of the spans that began and have not ended."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:  # noqa: ARG002
        """Note that it began."""
        self.names[span.context.span_id] = span.name

    def on_end(self, span: ReadableSpan) -> None:
        """Note that it ended."""
        self.names.pop(span.context.span_id, None)


OPEN_SPANS = OpenSpans()


@pytest.fixture(scope="session")
def exporter() -> InMemorySpanExporter:
    """Every span that the process' one real provider exports."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    provider.add_span_processor(OPEN_SPANS)
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture(scope="session")
def tracers(exporter: InMemorySpanExporter) -> dict[str, strands_tracer.Tracer]:
    """Strands' own tracer: over the real provider, and as it is where no provider is set.

    The framework makes one tracer per process, so a second one has to replace it.
    """
    with_provider = strands_tracer.get_tracer()
    without = strands_tracer.Tracer()
    without.tracer = trace.NoOpTracerProvider().get_tracer("strands.telemetry.tracer")
    return {"spans": with_provider, "hooks": without}


@pytest.fixture(scope="session", autouse=True)
def own_directories() -> Iterator[Path]:
    """Keep every program of every test away from the user's own ledger and temporary files.

    For the session: fixtures of modules start programs before any fixture of a test is there.
    """
    # Not below the directory of pytest, which only its owner may enter: a server that
    # refuses to be run by root runs as another user.
    base = Path(tempfile.mkdtemp(prefix="otel-limits-tests-"))
    base.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        move_to(base, patch)
        yield base
    shutil.rmtree(base, ignore_errors=True)


def move_to(directory: Path, patch: pytest.MonkeyPatch) -> None:
    """Make this process and its children keep data and temporary files in a directory."""
    patch.setenv("TMPDIR", str(directory))
    patch.setenv("XDG_DATA_HOME", str(directory / "data"))
    patch.setattr("tempfile.tempdir", str(directory))


@pytest.fixture(scope="session", autouse=True)
def kept_statements() -> Iterator[None]:
    """Compile each statement of SQL once, and not once for each of a thousand small ledgers.

    An engine has a dialect and compiled statements for itself alone.
    """
    compiled = LRUCache[Any, Any](1_000)

    def share(connection: Connection) -> None:
        connection.execution_options(compiled_cache=compiled)

    event.listen(Engine, "engine_connect", share)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SQLiteDialect, "__eq__", lambda one, other: type(one) is type(other))
        patch.setattr(SQLiteDialect, "__hash__", lambda dialect: hash(type(dialect)))
        yield
    event.remove(Engine, "engine_connect", share)


@pytest.fixture(scope="session")
def only_strands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to all installed packages except other frameworks, for environments of commands.

    Those that look at frameworks import all of them, which takes several times as long.
    """
    directory = tmp_path_factory.mktemp("packages")
    link_packages(directory, "langchain", "langgraph", "agents", "openai_agents")
    return directory


@pytest.fixture(autouse=True)
def temporary(own_directories: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Temporary files of this test alone: what another one left there is an orphan to a ledger.

    They stay until the session ends, as a server of `multiprocessing` keeps its socket there.
    """
    directory = Path(tempfile.mkdtemp(prefix="", dir=own_directories))
    directory.chmod(0o755)
    move_to(directory, monkeypatch)
    return directory


@pytest.fixture(autouse=True)
def clean(
    monkeypatch: pytest.MonkeyPatch,
    tracers: dict[str, strands_tracer.Tracer],
    exporter: InMemorySpanExporter,
) -> Iterator[None]:
    """No variable from outside, spans on; afterwards everything off and nothing left alive."""
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(strands_tracer, "_tracer_instance", tracers["spans"])
    exporter.clear()
    INTERNAL_ERRORS.forget_logged()
    yield
    otel_limits.disable()
    for thread in threading.enumerate():
        if thread.name == "otel-limits-deadlines":
            thread.join()  # it has nothing left to wait for, and must not find all of it replaced
    alive = len(LIVE)
    LIVE.after_fork()
    assert alive == 0, f"{alive} invocations are still live"


@pytest.fixture(autouse=True)
def no_fault(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test in which otel-limits logs an error fails, unless it asks for `faulty`."""
    errors: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: errors.append(  # type: ignore[method-assign]
        f"{record.getMessage()}\n{traceback.format_exc()}"
    )
    logger = logging.getLogger("otel_limits")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    if "faulty" not in request.fixturenames:
        assert errors == []


@pytest.fixture
def fake_time() -> Iterator[FakeTime]:
    """Time that the test advances."""
    with FakeTime() as time:
        yield time


@pytest.fixture
def faulty() -> None:
    """Permit errors of otel-limits in the log: the test provokes them."""


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> InMemorySpanExporter:
    """Exported spans of this test alone."""
    return exporter


@pytest.fixture
def open_spans() -> Callable[[], list[str]]:
    """Names of the spans of this test that began and have not ended."""
    OPEN_SPANS.names.clear()
    return lambda: list(OPEN_SPANS.names.values())


@pytest.fixture
def hooks_only(monkeypatch: pytest.MonkeyPatch, tracers: dict[str, strands_tracer.Tracer]) -> None:
    """No SDK provider: agents made from now on have no recorded spans."""
    monkeypatch.setattr(strands_tracer, "_tracer_instance", tracers["hooks"])


@pytest.fixture(params=["spans", "hooks"])
def source(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tracers: dict[str, strands_tracer.Tracer],
) -> str:
    """Where an invocation is followed: through its spans, or through hooks alone."""
    name = str(request.param)
    monkeypatch.setattr(strands_tracer, "_tracer_instance", tracers[name])
    return name


def call_sync(agent: Agent, prompt: Any = "go", **arguments: Any) -> AgentResult:
    """Invoke with `agent(…)`."""
    return agent(prompt, **arguments)


def call_async(agent: Agent, prompt: Any = "go", **arguments: Any) -> AgentResult:
    """Invoke with `invoke_async`."""
    return asyncio.run(agent.invoke_async(prompt, **arguments))


def call_stream(agent: Agent, prompt: Any = "go", **arguments: Any) -> AgentResult:
    """Invoke with `stream_async` and read it to its end."""

    async def read() -> AgentResult:
        results = [
            event["result"]
            async for event in agent.stream_async(prompt, **arguments)
            if "result" in event
        ]
        result: AgentResult = results[-1]
        return result

    return asyncio.run(read())


@pytest.fixture(params=[call_sync, call_async, call_stream], ids=["sync", "async", "stream"])
def call(request: pytest.FixtureRequest) -> Call:
    """Every way to invoke an agent."""
    way: Call = request.param
    return way


@pytest.fixture
def tool_runs() -> list[str]:
    """Queries that the tool `search` ran with."""
    return []


@pytest.fixture
def make_agent(tool_runs: list[str]) -> MakeAgent:
    """Make agents named `tester` that are silent and have the tool `search`."""

    @tool
    def search(query: str = "") -> str:
        """Search for a query."""
        tool_runs.append(query)
        return "nothing found"

    def make(model: Model, **arguments: Any) -> Agent:
        defaults: dict[str, Any] = {"tools": [search], "name": "tester", "callback_handler": None}
        return Agent(model=model, **(defaults | arguments))

    return make


@pytest.fixture
def events() -> list[otel_limits.Event]:
    """Every published event, when `events.append` is among the observers."""
    return []


@pytest.fixture
def warnings_logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Warnings that otel-limits has logged in this test so far."""

    def read() -> list[str]:
        return [
            record.getMessage()
            for record in caplog.records
            if record.name.startswith("otel_limits") and record.levelno == logging.WARNING
        ]

    return read


@pytest.fixture
def metric() -> Metric:
    """Read a sample of the default registry."""

    def read(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(name, labels) or 0.0

    return read
