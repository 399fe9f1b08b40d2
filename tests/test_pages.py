"""Every command of README and pages works, and prints what stands below it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_limits.dashboards.api import Prometheus
from tests.dashboards.servers import program, until, value_of, watched
from tests.pages import (
    ENDPOINTS,
    EVERY,
    PROMETHEUS,
    STORE,
    Command,
    Session,
    commands,
    is_shown,
    make,
    sessions,
    written,
)
from tests.quotas.conftest import Server, require_program
from tests.readme import ROOT
from tests.top.test_endpoints import answering
from tests.top.test_live import FLEET


def read(path: Path) -> str:
    """Read a page."""
    return path.read_text(encoding="utf-8")


QUOTAS, TOP, AUDIT = (ROOT / f"otel_limits/docs/{name}.md" for name in ("quotas", "top", "audit"))
OF_SERVERS = (QUOTAS, TOP, AUDIT)
WITH_COMMANDS = [path for path in EVERY if list(sessions(path)) and path not in OF_SERVERS]


@pytest.mark.parametrize("path", WITH_COMMANDS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_commands_print_what_a_page_says(path: Path, tmp_path: Path) -> None:
    """Run `python -m tests.pages` when this fails, and look at what it changed."""
    # As /tmp is a link somewhere else on a Mac.
    printed = written(path, Path(os.path.realpath(tmp_path)))
    assert printed == read(path)


def test_commands_about_quotas_work(tmp_path: Path) -> None:
    """On a server with nothing in it."""
    require_program("redis-server")
    server = Server(make(tmp_path / "redis"))
    server.start()
    try:
        assert written(QUOTAS, tmp_path, {STORE: server.url}) == read(QUOTAS)
    finally:
        server.stop()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An endpoint, and a real Prometheus that has scraped it."""
    program("prometheus")
    with answering(FLEET) as (endpoint, _):
        port = int(endpoint.partition(":")[2])
        with watched(tmp_path_factory.mktemp("prometheus"), {"agents": port}) as url:
            until(lambda: value_of(Prometheus(url), "sum(otel_limits_turns_total)"), "a scrape")
            yield {PROMETHEUS: url, **dict.fromkeys(ENDPOINTS, endpoint)}


@pytest.mark.parametrize("path", [TOP, AUDIT], ids=lambda path: path.stem)
def test_commands_about_metrics_work(
    path: Path, places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of `top` in a terminal, until there is an agent to see."""
    monkeypatch.setenv("OTEL_LIMITS_PROMETHEUS_PORT", places[ENDPOINTS[0]].partition(":")[2])
    directory = Path(os.path.realpath(tmp_path))
    assert written(path, directory, places) == read(path)


def test_a_wrong_output_is_found() -> None:
    """Also where a part is left out; what differs from machine to machine is not looked at."""
    assert is_shown("a\n[...]\nc 127.0.0.1:9464\n", "a\nb\nc 127.0.0.1:80\n")
    assert not is_shown("a\n[...]\nd\n", "a\nb\nc\n")
    assert not is_shown("a\n", "a\nb\n")


@pytest.mark.parametrize("text", ["otel-limits audit spent", "otel-limit check", "ls"])
def test_a_command_that_does_not_work_is_found(text: str, tmp_path: Path) -> None:
    """Whether or not its output is shown."""
    with pytest.raises(AssertionError):
        Session(tmp_path).run(Command(text, None))


def test_a_block_without_a_prompt_has_a_command_in_each_line() -> None:
    """And shows no output."""
    assert [each.shown for each in commands("a\nb  # why\n", 0)] == [None, None]
    assert [each.shown for each in commands("$ a\nx\ny\n$ b\n", 0)] == ["x\ny\n", ""]
