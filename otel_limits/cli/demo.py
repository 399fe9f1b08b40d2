"""The command `otel-limits demo`."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, Final

from otel_limits.bindings.installed import installed_frameworks, missing_framework
from otel_limits.cli.command import add_command, refuse
from otel_limits.cli.terminal import console

HELP: Final = """\
Demo a runaway agent with and without limits.

Runs the same agent four times: without limits, with max_turns, with max_token_budget and with
action=observe. Its model is scripted, so it needs no network and no credentials. It is an agent of
the framework that is installed: Strands, LangGraph or the OpenAI Agents SDK.

With --record, writes a sample ledger instead: four weeks of a fleet of agents, to try
`otel-limits audit` on.
"""

FAILED: Final = 1
INTERRUPTED: Final = 130
"""As shells report Ctrl-C: 128 + SIGINT."""


def add(commands: Any) -> None:
    """Add `demo`."""
    command = add_command(commands, "demo", HELP, demo)
    command.add_argument("--record", metavar="DIR", help="write a sample ledger to DIR/ledger.db")
    command.add_argument("--json", action="store_true", help="print JSON only")


def demo(options: Namespace) -> int:
    """Run the demo or write the sample ledger."""
    if options.record is not None:
        from otel_limits.demo.record import record

        if options.json:
            return refuse(["--record cannot be combined with other options."])
        return record(options.record)
    if (missing := missing_framework()) is not None:
        return refuse([missing], FAILED)
    from otel_limits.demo.main import main as play

    try:
        return play(installed_frameworks()[0], None if options.json else console())
    except KeyboardInterrupt:
        return INTERRUPTED
