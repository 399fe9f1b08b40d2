"""Pages: what their commands print, the wheel that has them, and the way of a model call."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dashboards.prometheus import Prometheus
from tests.dashboards.servers import program, until, value_of, watched
from tests.pages import (
    BLOCK,
    ENDPOINTS,
    EVERY,
    FILE,
    INSTALLED,
    PROMETHEUS,
    STORE,
    commands,
    home,
    make,
    sessions,
    with_outputs,
)
from tests.paths import ROOT
from tests.processes import PATIENCE_SECONDS
from tests.programs.cli.test_live import FLEET
from tests.quotas.fixtures import Server, require_program
from tests.readme import DOCS, OBSERVED, PAGES, README, with_tables
from tests.servers.top.test_scrapes import answering


def read(path: Path) -> str:
    """Read a page."""
    return path.read_text(encoding="utf-8")


QUOTAS, TOP, AUDIT = (ROOT / f"otel_limits/docs/{name}.md" for name in ("quotas", "top", "audit"))
SERVER_PAGES = (QUOTAS, TOP, AUDIT)
PAGES_WITH_COMMANDS = [path for path in EVERY if list(sessions(path)) and path not in SERVER_PAGES]


@pytest.mark.parametrize(
    "path", PAGES_WITH_COMMANDS, ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_commands_print_the_outputs_of_their_page(path: Path) -> None:
    """Run `python -m tests.generate outputs` when this fails, and review the changes."""
    with home() as directory:
        assert with_outputs(path, directory) == read(path)


def pasted(path: Path) -> Iterator[str]:
    """Yield the blocks of a page as a shell gets them, except those that install."""
    for language, body in BLOCK.findall(read(path)):
        file = FILE.match(body)
        if language == "python":
            name = file[1] if file else "pasted.py"
            yield f"cat >{name} <<'END'\n{body}END\n" + ("" if file else f"python {name}\n")
        elif language == "console" and not INSTALLED.search(body):
            yield "".join(f"{each.text}\n" for each in commands(body, 0))


def test_readme_works_as_pasted(tmp_path: Path) -> None:
    """Readers start with an empty directory, without credentials, and go from top to bottom."""
    home = tmp_path / "home"
    shell = subprocess.run(
        ["bash", "-eu"],
        input="".join(pasted(README)),
        cwd=make(tmp_path / "empty"),
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(make(home))},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert shell.returncode == 0, shell.stderr
    # The first program, the same without limits and in code.
    assert re.findall(r"^max_turns$|^end_turn$|reason='\w+'", shell.stdout, re.MULTILINE)[:3] == [
        "max_turns",
        "end_turn",
        "reason='max_turns'",
    ]
    assert "no successful invocation, but 20 are needed" in read(tmp_path / "empty/limits.yaml")
    assert "code-reviewer" in shell.stdout


def test_quota_commands_print_the_outputs_of_their_page(tmp_path: Path) -> None:
    """They start with an empty server."""
    require_program("redis-server")
    server = Server(make(tmp_path / "redis"))
    server.start()
    try:
        assert with_outputs(QUOTAS, tmp_path, {STORE: server.url}) == read(QUOTAS)
    finally:
        server.stop()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The addresses of a metrics endpoint and of a Prometheus that has scraped it."""
    program("prometheus")
    with answering(FLEET) as (endpoint, _):
        port = int(endpoint.partition(":")[2])
        with watched(tmp_path_factory.mktemp("prometheus"), {"agents": port}) as url:
            until(lambda: value_of(Prometheus(url), "sum(otel_limits_turns_total)"), "a scrape")
            yield {PROMETHEUS: url, **dict.fromkeys(ENDPOINTS, endpoint)}


@pytest.mark.parametrize("path", [TOP, AUDIT], ids=lambda path: path.stem)
def test_metric_commands_print_the_outputs_of_their_page(
    path: Path, places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`top` runs in a terminal until it shows an agent."""
    monkeypatch.setenv("OTEL_LIMITS_PROMETHEUS_PORT", places[ENDPOINTS[0]].partition(":")[2])
    directory = Path(os.path.realpath(tmp_path))
    assert with_outputs(path, directory, places) == read(path)


# --- the pages in the wheel -----------------------------------------------------------------------


def test_wheel_contains_every_page(tmp_path: Path) -> None:
    """`otel-limits docs` works without a checkout."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=100,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert names >= {f"otel_limits/docs/{path.name}" for path in PAGES}


# --- how it works ---------------------------------------------------------------------------------


def test_page_shows_the_files_through_which_a_call_goes() -> None:
    """Run `python -m tests.generate tables` when this fails."""
    page = (DOCS / "how-it-works.md").read_text("utf-8")
    assert with_tables(page, OBSERVED) == page
