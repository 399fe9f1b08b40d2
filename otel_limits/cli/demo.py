"""The command `otel-limits demo`."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, Final

from otel_limits.bindings.installed import require
from otel_limits.bindings.strands.strands_framework import STRANDS
from otel_limits.cli.command import add_command, refuse
from otel_limits.cli.terminal import console

HELP: Final = """\
Demo a runaway agent with and without limits.

Runs the same Strands agent four times: without limits, with max_turns, with max_token_budget and
with action=observe. It uses a built-in model server, so it needs no network and no credentials.
With --base-url, it makes at most 120 calls to a real model server.

With --record, writes a sample ledger instead: four weeks of a fleet of agents, to try
`otel-limits audit` on.
"""

FAILED: Final = 1


def add(commands: Any) -> None:
    """Add `demo`."""
    command = add_command(commands, "demo", HELP, demo)
    command.add_argument(
        "--base-url",
        metavar="URL",
        help="OpenAI-compatible model server, e.g. http://localhost:11434/v1",
    )
    command.add_argument("--model", metavar="NAME", help="model to use with --base-url")
    command.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the API key for --base-url"
    )
    command.add_argument("--record", metavar="DIR", help="write a sample ledger to DIR/ledger.db")
    command.add_argument("--json", action="store_true", help="print JSON only")


def demo(options: Namespace) -> int:
    """Run the demo or write the sample ledger."""
    if options.record is not None:
        from otel_limits.demo.record import record

        if options.base_url or options.model or options.api_key_env or options.json:
            return refuse(["--record cannot be combined with other options."])
        return record(options.record)
    try:
        require(STRANDS, "The demo")
    except ModuleNotFoundError as error:
        return refuse([str(error)], FAILED)
    from otel_limits.demo.main import main as play

    return play(
        base_url=options.base_url,
        model=options.model,
        screen=None if options.json else console(),
        api_key_env=options.api_key_env,
    )
