"""The command `otel-limits demo`: watch a real agent run away, and be stopped."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, Final

from otel_limits.cli.command import add_command, refuse

HELP: Final = """\
Watch a real agent run away, and be stopped.

The same Strands agent runs four times: without limits, with max_turns, with max_token_budget, and
with the action observe. It talks over HTTP to a built-in model server, so it needs no network and
no credentials. --base-url names a real one, which is asked 120 times at most.

--record DIR runs no agent: it writes DIR/ledger.db, four weeks of an example fleet. Every question
of otel-limits audit has an answer there, except reconcile, which needs a Prometheus.
"""


def add(commands: Any) -> None:
    """Add `demo`."""
    command = add_command(commands, "demo", HELP, demo)
    command.add_argument(
        "--base-url",
        metavar="URL",
        help="a real OpenAI-compatible model server instead, such as http://localhost:11434/v1",
    )
    command.add_argument("--model", metavar="NAME", help="the model to ask it for")
    command.add_argument(
        "--api-key-env", metavar="NAME", help="the environment variable with the key of that server"
    )
    command.add_argument(
        "--record", metavar="DIR", help="write an example ledger into a directory instead"
    )
    command.add_argument(
        "--json", action="store_true", help="print the same events as JSON and nothing else"
    )


def demo(options: Namespace) -> int:
    """Play the demonstration, or record an example."""
    if options.record is not None:
        from otel_limits.demo.record import record

        if options.base_url or options.model or options.api_key_env or options.json:
            return refuse(["--record plays nothing, so that it goes with no other option."])
        return record(options.record)
    # The demo stands above the command line: it uses its console, and starts programs as it does.
    from otel_limits.demo.main import main as play

    return play(
        base_url=options.base_url,
        model=options.model,
        as_json=options.json,
        api_key_env=options.api_key_env,
    )
