"""A scrape of several forked worker processes, under `PROMETHEUS_MULTIPROC_DIR`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.paths import SCRIPTS
from tests.processes import free_port

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="This system cannot fork.")


Scrape = dict[tuple[str, frozenset[tuple[str, str]]], float]


def run(program: str, directory: Path, *arguments: str, **environ: str) -> str:
    """Run a program of workers whose values are kept in `directory`; returns what it prints."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / program), *arguments],
        env={"PATH": os.environ["PATH"], "PROMETHEUS_MULTIPROC_DIR": str(directory), **environ},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def parsed(page: str) -> Scrape:
    """Every sample by its name and labels; several of one are an error."""
    samples: Scrape = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples
            samples[key] = sample.value
    return samples


def value(samples: Scrape, name: str, **labels: str) -> float:
    """One sample."""
    return samples[f"otel_limits_{name}", frozenset({"agent": "worker", **labels}.items())]


@pytest.mark.parametrize(("arguments", "processes"), [((), 3), (("--preload",), 4)])
def test_workers_are_counted_together(
    arguments: tuple[str, ...], processes: int, tmp_path: Path
) -> None:
    """Each worker's halt is counted once, and so is that of a parent that ran an agent first."""
    samples = parsed(run("workers.py", tmp_path, *arguments))

    assert value(samples, "stops_total", reason="max_turns", action="halted") == processes
    assert value(samples, "stops_total", reason="killed", action="killed") == 0
    assert value(samples, "turns_total") == 2 * processes
    assert value(samples, "tokens_total", model="scripted", type="input") == 20 * processes
    assert value(samples, "invocation_turns_count") == processes
    assert value(samples, "invocation_turns_bucket", le="2.0") == processes
    assert value(samples, "invocation_turns_bucket", le="1.0") == 0


def test_a_limit_is_not_added_up(tmp_path: Path) -> None:
    """Four processes with the same limit have that limit, while they live."""
    samples = parsed(run("workers.py", tmp_path, "--preload"))

    assert value(samples, "limit", limit="max_turns") == 2


def test_a_worker_that_is_gone_has_nothing_in_progress(tmp_path: Path) -> None:
    """Once prometheus_client knows of its end, through gunicorn's `child_exit`."""
    samples = parsed(run("workers.py", tmp_path, "--preload", "--crash"))

    assert value(samples, "invocations_in_progress") == 0


def test_a_worker_that_is_gone_untold_stays_in_progress(tmp_path: Path) -> None:
    """As the documentation of several processes says."""
    samples = parsed(run("workers.py", tmp_path, "--preload", "--crash", "--forget"))

    assert value(samples, "invocations_in_progress") == 1


def test_worker_with_the_port_answers_for_all(tmp_path: Path) -> None:
    """The first worker serves what the second counts, and the second serves when the first ends.

    The second calls that no error. A third was killed while it created its file.
    """
    (tmp_path / "counter_1.db").touch()
    pages = run("serving_workers.py", tmp_path, OTEL_LIMITS_PROMETHEUS_PORT=str(free_port()))

    assert "cannot serve" not in pages
    for page in pages.split("\f"):
        samples = parsed(page)
        for agent in ("first", "second"):
            assert value(samples, "stops_total", agent=agent, reason="end_turn", action="none") == 1


def test_one_worker_that_cannot_enforce_shows(tmp_path: Path) -> None:
    """The least of all live workers is what an alert sees; one that is gone does not count."""
    both, one, _ = run("guarded.py", tmp_path).split("\f")

    key = ("otel_limits_enforcing", frozenset({("source", "code"), ("framework", "strands")}))
    assert (parsed(both)[key], parsed(one)[key]) == (0, 1)
