"""The guides for production work: workers, notebooks, images and Kubernetes."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from urllib.request import urlopen

import jsonschema
import pytest
import yaml
from celery import Celery
from prometheus_client.parser import text_string_to_metric_families

from otel_limits.cli import main
from otel_limits.cli.parser import make_parser
from otel_limits.settings.policy.reader import parse
from otel_limits.settings.table import SETTINGS
from otel_limits.testing import ScriptedModel, endless, uses
from tests.launching import RUN
from tests.pages import BLOCK, files, sessions
from tests.processes import PATIENCE_SECONDS, free_port
from tests.quotas.conftest import Server, require_program
from tests.readme import PAGES, README, ROOT
from tests.test_workers import PROGRAMS, ask, served

if TYPE_CHECKING:
    from tests.conftest import MakeAgent

DOCS = ROOT / "otel_limits/docs"


def read(name: str) -> str:
    """Read a page."""
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def start_command(name: str) -> list[str]:
    """Return the command of a page that starts its program, with this Python."""
    (words,) = (each.words for each in sessions(DOCS / f"{name}.md") if " run -- " in each.text)
    return [*RUN, *words[2:]]


# --- FastAPI with workers -------------------------------------------------------------------------

AGENTS = """\
import os
from strands_agents import call, make_agent
def answer(prompt):
    return call("api") | {"pid": os.getpid()}
"""
"""The reader's own module: here, an agent that calls its tool 12 times."""


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """Serve the page's application with two workers; yield its port and the metrics port."""
    tmp_path = tmp_path_factory.mktemp("api")
    (tmp_path / "api.py").write_text(files(DOCS / "fastapi.md")["api.py"], encoding="utf-8")
    (tmp_path / "agents.py").write_text(AGENTS, encoding="utf-8")
    (tmp_path / "numbers").mkdir()
    port, metrics = free_port(), free_port()
    words = [*start_command("fastapi"), f"--port={port}"]
    with served(
        words,
        PYTHONPATH=f"{tmp_path}{os.pathsep}{PROGRAMS}",
        PROMETHEUS_MULTIPROC_DIR=str(tmp_path / "numbers"),
        OTEL_LIMITS_PROMETHEUS_PORT=str(metrics),
    ):
        yield port, metrics


def test_fastapi_scrape_returns_metrics_of_all_workers(api: tuple[int, int]) -> None:
    """Each worker halts its agents, and the metrics of one must not hide the others."""
    port, metrics = api
    answers: list[Any] = []
    while len({answer["pid"] for answer in answers}) < 2 and len(answers) < 200:
        answers.append(ask(port, "ask?prompt=go"))
    assert {answer["stop_reason"] for answer in answers} == {"max_turns"}
    assert len({answer["pid"] for answer in answers}) == 2
    with urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=10) as scraped:
        families = list(text_string_to_metric_families(scraped.read().decode()))
    turns = [
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "otel_limits_turns_total" and sample.labels["agent"] == "api"
    ]
    assert sum(turns) == 3 * len(answers)


def test_fastapi_chat_shows_the_text_of_a_halt(api: tuple[int, int]) -> None:
    """The page of a chat is never empty: the end user's text arrives as an event, once."""
    port, _ = api
    ask(port, "ask?prompt=go")  # once the server is up
    with urlopen(f"http://127.0.0.1:{port}/chat?prompt=go", timeout=PATIENCE_SECONDS) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        events = answer.read().decode().split("\n\n")
    assert [json.loads(each.removeprefix("data: ")) for each in events if each] == [
        "This request could not be completed because it took too many steps."
    ]


def test_celery_task_is_limited(tmp_path: Path) -> None:
    """The task runs in a child process of the page's worker."""
    require_program("redis-server")
    server = Server(tmp_path)
    program = files(DOCS / "celery.md")["tasks.py"]
    program = program.replace("redis://localhost:6379/", f"redis://127.0.0.1:{server.port}/")
    (tmp_path / "tasks.py").write_text(program, encoding="utf-8")
    (tmp_path / "agents.py").write_text(AGENTS, encoding="utf-8")
    server.start()
    try:
        with served(start_command("celery"), PYTHONPATH=f"{tmp_path}{os.pathsep}{PROGRAMS}"):
            broker, backend = re.findall(r'"(redis:[^"]+)"', program)
            client = Celery("tasks", broker=broker, backend=backend)
            answer = client.send_task("tasks.ask", ["go"]).get(timeout=PATIENCE_SECONDS)
            client.close()
    finally:
        server.stop()
    assert answer["stop_reason"] == "max_turns"


def test_notebook_cell_limits_agents(
    make_agent: MakeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent is called without `await` while the event loop of the kernel runs."""
    monkeypatch.chdir(tmp_path)
    (first,) = (body for language, body in BLOCK.findall(read("jupyter")) if language == "python")

    async def cell() -> str:
        exec(first, {})  # noqa: S102  it is the page's
        agent = make_agent(ScriptedModel(endless(uses("search"))))
        return str(agent("go").stop_reason)

    with patch.dict(os.environ):
        assert asyncio.run(cell()) == "loop_detected"
    assert (tmp_path / "ledger.db").exists()


# --- Kubernetes -----------------------------------------------------------------------------------

MANIFESTS = {
    manifest["kind"]: manifest
    for manifest in yaml.safe_load_all(files(DOCS / "kubernetes.md")["agents.yaml"])
}
SCHEMAS: dict[str, Any] = json.loads(
    (ROOT / "tests/kubernetes_schemas.json").read_text(encoding="utf-8")
)
"""The published schemas, reduced to the fields that the page uses."""


def schema_errors(manifest: dict[str, Any]) -> list[str]:
    """Return the violations of an object's schema."""
    checks = jsonschema.Draft202012Validator(SCHEMAS[manifest["kind"]])
    return [error.message for error in checks.iter_errors(manifest)]


@pytest.mark.parametrize("kind", ["Secret", "ConfigMap", "Deployment", "PodMonitor"])
def test_kubernetes_object_matches_its_schema(kind: str) -> None:
    """Unknown fields are errors, so a misspelled one is found."""
    assert schema_errors(MANIFESTS[kind]) == []
    misspelled = copy.deepcopy(MANIFESTS[kind])
    part = "spec" if "spec" in misspelled else "metadata"
    misspelled[part]["nmae"] = "agents"
    assert len(schema_errors(misspelled)) == 1


def container() -> dict[str, Any]:
    """Return the container of the Deployment."""
    (found,) = MANIFESTS["Deployment"]["spec"]["template"]["spec"]["containers"]
    answer: dict[str, Any] = found
    return answer


def test_kubernetes_environment_passes_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The policy file is read from the mount path of the ConfigMap."""
    (tmp_path / "limits.yaml").write_text(MANIFESTS["ConfigMap"]["data"]["limits.yaml"])
    for name, value in MANIFESTS["Secret"]["stringData"].items():
        monkeypatch.setenv(name, value)
    for variable in container()["env"]:
        value = variable["value"].replace("/etc/otel-limits", str(tmp_path))
        monkeypatch.setenv(variable["name"], value)
    assert main(["check"]) == 0, capsys.readouterr()
    assert parse(MANIFESTS["ConfigMap"]["data"]["limits.yaml"], "limits.yaml")[1] == ()


def test_pod_monitor_scrapes_the_metrics_port() -> None:
    """A wrong port name or label would leave pods unscraped without an error."""
    (port,) = container()["ports"]
    (endpoint,) = MANIFESTS["PodMonitor"]["spec"]["podMetricsEndpoints"]
    variables = {variable["name"]: variable["value"] for variable in container()["env"]}
    assert endpoint["port"] == port["name"]
    assert variables["OTEL_LIMITS_PROMETHEUS_PORT"] == str(port["containerPort"])
    labels = MANIFESTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert MANIFESTS["PodMonitor"]["spec"]["selector"]["matchLabels"] == labels


# --- images and variables -------------------------------------------------------------------------

IMAGES = [
    (path.stem, body)
    for path in PAGES
    for language, body in BLOCK.findall(path.read_text(encoding="utf-8"))
    if language == "dockerfile"
]
EXTRAS = re.compile(r"'otel-limits\[([\w,]+)\]'")


@pytest.mark.parametrize("body", [body for _, body in IMAGES], ids=[name for name, _ in IMAGES])
def test_image_uses_existing_commands_and_extras(body: str) -> None:
    """Readers copy the file."""
    for command in re.findall(r"(otel-limits (?!\[)[a-z][^&\n]*)", body):
        make_parser().parse_args(shlex.split(command)[1:])
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extra in ",".join(EXTRAS.findall(body)).split(","):
        assert not extra or f"\n{extra} = [" in project


def test_variables_in_pages_exist() -> None:
    """A name that ends in `…` or `*` is a prefix of others."""
    known = [setting.variable for setting in SETTINGS]
    text = "".join(path.read_text(encoding="utf-8") for path in (README, *PAGES))
    named = set(re.findall(r"\bOTEL_LIMITS_[A-Z_]+(?![A-Z_])(?:…|\*)?", text))
    unknown = [
        name
        for name in named
        if not any(
            variable == name or (name[-1] in "…*_" and variable.startswith(name.rstrip("…*")))
            for variable in known
        )
    ]
    assert unknown == []
