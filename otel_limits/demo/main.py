"""Plays the demonstration from beginning to end: on a terminal, in plain text, or as JSON."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from typing import Final
from urllib.parse import urlsplit

from otel_limits.cli.terminal import console
from otel_limits.core.secrets import redact_url
from otel_limits.demo.play import AgentFailedError, Play, Scenario, ScenarioOutcome, Setup
from otel_limits.demo.server import Servers
from otel_limits.demo.show import events, show_outcomes, show_setup, watch
from otel_limits.settings.variables import environment

SCENARIOS: Final = (
    Scenario(name="no_limits", variables={}, ends_with="end_turn"),
    Scenario(
        name="max_turns",
        variables={"OTEL_LIMITS_MAX_TURNS": "6"},
        ends_with="max_turns",
        asks_cache=True,
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

PENDING_LOOKS: Final = 20
"""Enough to see a runaway, and done in a second."""

PENDING_LOOKS_OF_REAL_MODEL: Final = 12
"""Real models take their time."""

CONNECT_SECONDS: Final = 5.0
FAILED: Final = 1
BAD_ARGUMENT: Final = 2
INTERRUPTED: Final = 130


def main(
    *, base_url: str | None, model: str | None, as_json: bool, api_key_env: str | None = None
) -> int:
    """Play it.

    Args:
        base_url: A real model server, with or without /v1; the built-in one unless given.
        model: What to ask it for.
        as_json: Print the events for machines instead of showing them.
        api_key_env: Name of the variable with the key that the real model server wants to see.

    Returns:
        The exit status: 1 when a program failed or a scenario did not end as it should.
    """
    try:
        setup = make_setup(base_url, model, api_key_env)
    except ValueError as error:
        sys.stderr.write(f"otel-limits demo: {error}\n")
        return BAD_ARGUMENT
    try:
        return play(setup, as_json=as_json)
    except AgentFailedError as error:
        sys.stderr.write(f"otel-limits demo: {error}\n")
        return FAILED
    except KeyboardInterrupt:
        # As a shell reports a program that Ctrl-C has ended: 128 + SIGINT.
        return INTERRUPTED


def make_setup(base_url: str | None, model: str | None, api_key_env: str | None) -> Setup:
    """Decide who the agents talk to.

    Raises:
        ValueError: `base_url` is not an address of a server, or nobody listens there; or there is
            no key where one is said to be.
    """
    if api_key_env is not None and base_url is None:
        raise ValueError("--api-key-env is for a real model server: give its --base-url as well.")
    api_key = None if api_key_env is None else key_in(api_key_env)
    looks, default_model = PENDING_LOOKS, "demo"
    if base_url is not None:
        # Clients append /v1 by themselves, and users paste addresses with it.
        base_url = reachable(base_url.rstrip("/").removesuffix("/v1"))
        looks, default_model = PENDING_LOOKS_OF_REAL_MODEL, "default"
    return Setup(
        base_url=base_url,
        model=model or default_model,
        pending_looks=looks,
        scenarios=SCENARIOS,
        api_key=api_key,
    )


def key_in(name: str) -> str:
    """Read a key from an environment variable; it is never shown.

    Raises:
        ValueError: There is none, or it cannot be sent.
    """
    key = environment().get(name, "").strip()
    if not key:
        raise ValueError(f"--api-key-env must name a variable with the key, but {name} is not set.")
    # What an HTTP header may hold: https://datatracker.ietf.org/doc/html/rfc6750#section-2.1
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"--api-key-env: {name} holds characters that a key cannot have.")
    return key


def reachable(base_url: str) -> str:
    """Return `base_url`, or explain why nothing can be asked there.

    Raises:
        ValueError: It is not an address of a server, or nobody listens there.
    """
    host, port = host_and_port(base_url)
    try:
        # Looked at before any scenario starts, or four programs would each report the same failure.
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"No model server answers at {redact_url(base_url)} ({error}). "
            f"Start it, or leave --base-url out to use the built-in one."
        ) from error
    return base_url


def host_and_port(base_url: str) -> tuple[str, int]:
    """Read where a server listens.

    Raises:
        ValueError: It is not the address of a server.
    """
    with contextlib.suppress(ValueError):  # such as a bracket, or a port that is not a number
        parts = urlsplit(base_url)
        if parts.scheme in ("http", "https") and parts.hostname:
            return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    raise ValueError(
        f"--base-url must be like http://localhost:11434/v1, got {redact_url(base_url)!r}."
    )


def play(setup: Setup, *, as_json: bool) -> int:
    """Run every scenario, say what happened, and judge it."""
    screen = console()
    started = time.monotonic()
    with Servers(setup.pending_looks) as servers, Play(setup, servers) as running:
        if not as_json:
            show_setup(screen, setup, servers)
            watch(screen, running)
        # A program that failed is told here, when all that there was to see has been shown.
        outcomes = [future.result() for future in running.futures]
    seconds = time.monotonic() - started
    if as_json:
        print(json.dumps(events(setup, outcomes, seconds), indent=2))  # noqa: T201  its output
    else:
        show_outcomes(screen, setup, outcomes, seconds)
    return judge(setup, outcomes)


def judge(setup: Setup, outcomes: list[ScenarioOutcome]) -> int:
    """Say on standard error which scenario ended otherwise than it should.

    A real model is not judged: it may end by itself before a limit is reached.
    """
    wrong = [
        outcome
        for outcome in outcomes
        if setup.base_url is None and outcome.errand.stop_reason != outcome.scenario.ends_with
    ]
    for outcome in wrong:
        sys.stderr.write(
            f"otel-limits demo: {outcome.scenario.name} ended with "
            f"{outcome.errand.stop_reason!r}, not with {outcome.scenario.ends_with!r}.\n"
        )
    return FAILED if wrong else 0
