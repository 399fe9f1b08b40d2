"""The demo from start to end: on a terminal, as plain text or as JSON."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from otel_limits.core.secrets import redact_url
from otel_limits.demo.output import events, show_outcomes, show_setup, watch
from otel_limits.demo.play import AgentFailedError, DemoRun, Scenario, ScenarioOutcome, Setup
from otel_limits.demo.server import DemoServers
from otel_limits.settings.variables import environment

if TYPE_CHECKING:
    from rich.console import Console

SCENARIOS: Final = (
    Scenario(name="no_limits", variables={}, ends_with="end_turn"),
    Scenario(
        name="max_turns",
        variables={"OTEL_LIMITS_MAX_TURNS": "6"},
        ends_with="max_turns",
        calls_guarded=True,
    ),
    Scenario(
        name="max_token_budget",
        variables={"OTEL_LIMITS_MAX_TOKEN_BUDGET": "5000"},
        ends_with="max_token_budget",
    ),
    Scenario(
        name="observe",
        variables={"OTEL_LIMITS_MAX_TURNS": "6", "OTEL_LIMITS_ACTION": "observe"},
        ends_with="end_turn",
    ),
)

PENDING_POLLS: Final = 20
"""Enough to show a runaway, and done in a second."""

PENDING_POLLS_OF_REAL_MODEL: Final = 12
"""Fewer, because real models are slower."""

CONNECT_SECONDS: Final = 5.0
FAILED: Final = 1
BAD_ARGUMENT: Final = 2
INTERRUPTED: Final = 130


def main(
    *,
    base_url: str | None,
    model: str | None,
    screen: Console | None,
    api_key_env: str | None = None,
) -> int:
    """Run the demo.

    Args:
        base_url: A real model server, with or without /v1. Default: the built-in one.
        model: Its model.
        screen: Where to print. Without one, JSON goes to standard output.
        api_key_env: Name of the environment variable with its API key.

    Returns:
        The exit status: 1 if a program failed or a scenario did not end as expected.
    """
    try:
        setup = make_setup(base_url, model, api_key_env)
    except ValueError as error:
        sys.stderr.write(f"otel-limits demo: {error}\n")
        return BAD_ARGUMENT
    try:
        return play(setup, screen)
    except AgentFailedError as error:
        sys.stderr.write(f"otel-limits demo: {error}\n")
        return FAILED
    except KeyboardInterrupt:
        # As shells report Ctrl-C: 128 + SIGINT.
        return INTERRUPTED


def make_setup(base_url: str | None, model: str | None, api_key_env: str | None) -> Setup:
    """Choose the model server of the agents.

    Raises:
        ValueError: `base_url` is invalid or unreachable, or the API key is missing.
    """
    if api_key_env is not None and base_url is None:
        raise ValueError("--api-key-env requires --base-url.")
    api_key = None if api_key_env is None else read_api_key(api_key_env)
    polls, default_model = PENDING_POLLS, "demo"
    if base_url is not None:
        # Clients append /v1, and users paste URLs that include it.
        base_url = require_reachable(base_url.rstrip("/").removesuffix("/v1"))
        polls, default_model = PENDING_POLLS_OF_REAL_MODEL, "default"
    return Setup(
        base_url=base_url,
        model=model or default_model,
        pending_polls=polls,
        scenarios=SCENARIOS,
        api_key=api_key,
    )


def read_api_key(name: str) -> str:
    """Read an API key from an environment variable. It is never printed.

    Raises:
        ValueError: It is not set or not valid in an HTTP header.
    """
    key = environment().get(name, "").strip()
    if not key:
        raise ValueError(f"--api-key-env: {name} is not set.")
    # Characters valid in an HTTP header: https://datatracker.ietf.org/doc/html/rfc6750#section-2.1
    if not (key.isascii() and key.isprintable()):
        raise ValueError(
            f"--api-key-env: {name} contains characters that are invalid in an API key."
        )
    return key


def require_reachable(base_url: str) -> str:
    """Return `base_url` if a server accepts connections there.

    Raises:
        ValueError: It is not a valid URL, or no server accepts connections there.
    """
    host, port = host_and_port(base_url)
    try:
        # Checked first, or four programs would each report the same failure.
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"No model server at {redact_url(base_url)} ({error}). "
            "Start it, or omit --base-url to use the built-in one."
        ) from error
    return base_url


def host_and_port(base_url: str) -> tuple[str, int]:
    """Parse the host and port of a URL.

    Raises:
        ValueError: It is not the URL of a server.
    """
    with contextlib.suppress(ValueError):  # e.g. a bracket, or a port that is not a number
        parts = urlsplit(base_url)
        if parts.scheme in ("http", "https") and parts.hostname:
            return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    raise ValueError(
        f"--base-url must be a URL such as http://localhost:11434/v1, got {redact_url(base_url)!r}."
    )


def play(setup: Setup, screen: Console | None) -> int:
    """Run all scenarios and print their outcomes; return the exit status."""
    started = time.monotonic()
    with DemoServers(setup.pending_polls) as servers, DemoRun(setup, servers) as running:
        if screen is not None:
            show_setup(screen, setup, servers)
            watch(screen, running)
        # Raises the error of a failed program, after progress has been shown.
        outcomes = [future.result() for future in running.futures]
    seconds = time.monotonic() - started
    if screen is None:
        print(json.dumps(events(setup, outcomes, seconds), indent=2))  # noqa: T201  its output
    else:
        show_outcomes(screen, setup, outcomes, seconds)
    return report_unexpected(setup, outcomes)


def report_unexpected(setup: Setup, outcomes: list[ScenarioOutcome]) -> int:
    """Print scenarios that did not end as expected to standard error; return the exit status.

    With a real model there is no expectation: it may finish before a limit is reached.
    """
    unexpected = [
        outcome
        for outcome in outcomes
        if setup.base_url is None and outcome.result.stop_reason != outcome.scenario.ends_with
    ]
    for outcome in unexpected:
        sys.stderr.write(
            f"otel-limits demo: {outcome.scenario.name} ended with "
            f"{outcome.result.stop_reason!r}, expected {outcome.scenario.ends_with!r}.\n"
        )
    return FAILED if unexpected else 0
