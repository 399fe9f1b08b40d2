"""Tests of `otel-limits demo --base-url`: bounded calls and a secret API key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from otel_limits.cli import main
from otel_limits.demo.main import SCENARIOS
from otel_limits.demo.play import MAX_CALLS_PER_RUN
from otel_limits.demo.server import DemoServers, Handler, ModelReply

KEY = "sk-hunter2"


class Clumsy(DemoServers):
    """A model server whose tool calls always lack the required argument."""

    def __init__(self) -> None:
        """Bind a free port."""
        super().__init__(pending_polls=0)
        self.RequestHandlerClass = RecordingHandler
        self.authorizations: list[str | None] = []

    def answer(self, agent: str, messages: Sequence[Mapping[str, Any]]) -> ModelReply:
        """Call the tool without its argument."""
        super().answer(agent, messages)
        return ModelReply(arguments='{"nonsense": 1}', prompt_tokens=40)


class RecordingHandler(Handler):
    """Records the Authorization headers of requests."""

    def do_POST(self) -> None:  # noqa: N802  the base class's name
        """Serve a model call."""
        assert isinstance(self.server, Clumsy)
        self.server.authorizations.append(self.headers["Authorization"])
        super().do_POST()


@contextmanager
def played(capsys: pytest.CaptureFixture[str], *arguments: str) -> Iterator[tuple[Clumsy, str]]:
    """Run the demo against a clumsy model; yield the server and the output."""
    with Clumsy() as server:
        status = main(["demo", "--base-url", server.url("real"), *arguments])
        shown, errors = capsys.readouterr()
        assert (status, errors) == (0, "")
        yield server, shown


def test_calls_are_bounded_when_tool_calls_fail(capsys: pytest.CaptureFixture[str]) -> None:
    """The user pays for at most 120 calls, and the output shows what ended each run."""
    with played(capsys, "--json") as (server, shown):
        events = json.loads(shown)
    assert len(server.authorizations) == sum(each["model_calls"] for each in events["scenarios"])
    assert len(server.authorizations) <= 120
    ends = {each["name"]: each for each in events["scenarios"]}
    assert ends["max_turns"]["model_calls"] == 6
    for name in ("no_limits", "observe"):
        assert ends[name]["model_calls"] == MAX_CALLS_PER_RUN
        assert ends[name]["ended_by_demo"] is True
        assert ends[name]["result"]["out_of_calls"] is True


def test_runaway_is_marked_without_colors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output to a pipe has no colors."""
    monkeypatch.setattr("otel_limits.demo.main.SCENARIOS", SCENARIOS[:1])
    with played(capsys) as (_, shown):
        assert "the runs that were not halted would never end." in shown
        assert " ran away" in shown


def test_api_key_is_sent_but_not_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call sends it, without the trailing newline."""
    monkeypatch.setattr("otel_limits.demo.main.SCENARIOS", SCENARIOS[1:2])
    monkeypatch.setenv("MODEL_KEY", f"{KEY}\n")
    with played(capsys, "--api-key-env", "MODEL_KEY", "--json") as (server, shown):
        assert server.authorizations == [f"Bearer {KEY}"] * 6
        assert KEY not in shown


def test_no_authorization_without_api_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local model servers need none."""
    monkeypatch.setattr("otel_limits.demo.main.SCENARIOS", SCENARIOS[1:2])
    with played(capsys) as (server, _):
        assert set(server.authorizations) == {None}


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("", "--api-key-env: MODEL_KEY is not set."),
        ("hunter2\n2", "MODEL_KEY contains characters that are invalid in an API key."),
        ("hunter2\N{EURO SIGN}", "MODEL_KEY contains characters that are invalid in an API key."),
    ],
)
def test_invalid_api_key_is_rejected(
    key: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any request, and without printing the key."""
    monkeypatch.setenv("MODEL_KEY", key)
    assert main(["demo", "--base-url", "http://127.0.0.1:1", "--api-key-env", "MODEL_KEY"]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "hunter2" not in errors


def test_api_key_requires_base_url(capsys: pytest.CaptureFixture[str]) -> None:
    """The built-in server needs no key."""
    assert main(["demo", "--api-key-env", "HOME"]) == 2
    assert "requires --base-url." in capsys.readouterr().err
