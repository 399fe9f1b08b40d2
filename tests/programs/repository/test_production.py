"""The guides for production work: FastAPI, Celery and Kubernetes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from celery import Celery
from prometheus_client.parser import text_string_to_metric_families

from otel_limits.cli import main
from otel_limits.settings.policy.reader import parse
from tests.launching import RUN
from tests.pages import files, sessions
from tests.paths import SCRIPTS
from tests.price_list import listed
from tests.processes import PATIENCE_SECONDS, free_port
from tests.programs.runtime.test_workers import ask, served
from tests.quotas.fixtures import Server, require_program
from tests.unit.repository.test_production import DOCS, MANIFESTS, container


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
    (tmp_path / "my_agents.py").write_text(AGENTS, encoding="utf-8")
    (tmp_path / "numbers").mkdir()
    port, metrics = free_port(), free_port()
    words = [*start_command("fastapi"), f"--port={port}"]
    with served(
        words,
        PYTHONPATH=f"{tmp_path}{os.pathsep}{SCRIPTS}",
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
    (tmp_path / "my_agents.py").write_text(AGENTS, encoding="utf-8")
    server.start()
    try:
        with served(start_command("celery"), PYTHONPATH=f"{tmp_path}{os.pathsep}{SCRIPTS}"):
            broker, backend = re.findall(r'"(redis:[^"]+)"', program)
            client = Celery("tasks", broker=broker, backend=backend)
            answer = client.send_task("tasks.ask", ["go"]).get(timeout=PATIENCE_SECONDS)
            client.close()
    finally:
        server.stop()
    assert answer["stop_reason"] == "max_turns"


@listed
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
