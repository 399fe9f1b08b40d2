"""The demonstration against somebody else's model server: bounded, and trusted with a key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from otel_limits.cli import main
from otel_limits.demo.main import SCENARIOS
from otel_limits.demo.play import MOST_CALLS
from otel_limits.demo.server import Handler, ModelReply, Servers

KEY = "sk-hunter2"


class Clumsy(Servers):
    """A model server whose every tool call is without the argument that the tool needs."""

    def __init__(self) -> None:
        """Bind a free port."""
        super().__init__(pending_looks=0)
        self.RequestHandlerClass = Asked
        self.authorizations: list[str | None] = []

    def answer(self, agent: str, messages: Sequence[Mapping[str, Any]]) -> ModelReply:
        """Call the tool wrongly, whatever was said."""
        super().answer(agent, messages)
        return ModelReply(arguments='{"nonsense": 1}', prompt_tokens=40)


class Asked(Handler):
    """Remembers who asked."""

    def do_POST(self) -> None:  # noqa: N802  the name that the base class looks for
        """Answer a model call."""
        assert isinstance(self.server, Clumsy)
        self.server.authorizations.append(self.headers["Authorization"])
        super().do_POST()


@contextmanager
def played(capsys: pytest.CaptureFixture[str], *arguments: str) -> Iterator[tuple[Clumsy, str]]:
    """Play the demonstration against a clumsy model; give the server and all that was shown."""
    with Clumsy() as server:
        status = main(["demo", "--base-url", server.url("real"), *arguments])
        shown, errors = capsys.readouterr()
        assert (status, errors) == (0, "")
        yield server, shown


def test_it_is_bounded_where_tool_calls_fail(capsys: pytest.CaptureFixture[str]) -> None:
    """Who pays for the model pays for 120 calls at most; what ended a run is said."""
    with played(capsys, "--json") as (server, shown):
        events = json.loads(shown)
    assert len(server.authorizations) == sum(each["model_calls"] for each in events["scenarios"])
    assert len(server.authorizations) <= 120
    ends = {each["name"]: each for each in events["scenarios"]}
    assert ends["max_turns"]["model_calls"] == 6
    for name in ("no_limits", "observe"):
        assert ends[name]["model_calls"] == MOST_CALLS
        assert ends[name]["bounded_by_demo"] is True
        assert ends[name]["result"]["out_of_calls"] is True


def test_runs_are_told_apart_without_colours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe shows none."""
    monkeypatch.setattr("otel_limits.demo.main.SCENARIOS", SCENARIOS[:1])
    with played(capsys) as (_, shown):
        assert "in red" not in shown
        assert "the runs that otel-limits did not halt would never have ended." in shown
        assert "the demo ended it" in shown


def test_the_key_is_sent_to_the_model_and_shown_to_nobody(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call has it, without the line break that a file ends with."""
    monkeypatch.setattr("otel_limits.demo.main.SCENARIOS", SCENARIOS[1:2])
    monkeypatch.setenv("MODEL_KEY", f"{KEY}\n")
    with played(capsys, "--api-key-env", "MODEL_KEY", "--json") as (server, shown):
        assert server.authorizations == [f"Bearer {KEY}"] * 6
        assert KEY not in shown


def test_without_a_key_none_is_sent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server of one's own wants none."""
    monkeypatch.setattr("otel_limits.demo.main.SCENARIOS", SCENARIOS[1:2])
    with played(capsys) as (server, _):
        assert set(server.authorizations) == {None}


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("", "must name a variable with the key, but MODEL_KEY is not set."),
        ("hunter2\n2", "MODEL_KEY holds characters that a key cannot have."),
        ("hunter2\N{EURO SIGN}", "MODEL_KEY holds characters that a key cannot have."),
    ],
)
def test_a_key_that_cannot_be_sent_is_refused(
    key: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anybody is asked, and without the key."""
    monkeypatch.setenv("MODEL_KEY", key)
    assert main(["demo", "--base-url", "http://127.0.0.1:1", "--api-key-env", "MODEL_KEY"]) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert "hunter2" not in errors


def test_a_key_needs_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    """The built-in one wants none."""
    assert main(["demo", "--api-key-env", "HOME"]) == 2
    assert "give its --base-url as well." in capsys.readouterr().err
