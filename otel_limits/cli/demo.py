"""The command `otel-limits demo`."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from typing import Any, Final

from otel_limits.bindings.known import installed_frameworks, missing_framework
from otel_limits.cli.command import add_command, refuse
from otel_limits.cli.terminal import console
from otel_limits.core.values import PORT

HELP: Final = """\
Demo a runaway agent with and without limits.

Runs the same agent twice: without limits and with max_turns. Its model is scripted, so it needs no
network and no credentials. It is an agent of the framework that is installed: Strands, LangGraph or
the OpenAI Agents SDK.

With --serve, runs a fleet of such agents until Ctrl-C, with metrics, quotas and a ledger in a new
temporary directory, to try `otel-limits top`, `otel-limits audit` and dashboards on.

With --record, writes a sample ledger, its policy file and vendors' bills instead: four weeks of a
fleet of agents, to try `otel-limits audit` on.
"""

FAILED: Final = 1
DEFAULT_PORT: Final = 9464
INTERRUPTED: Final = 130
"""As shells report Ctrl-C: 128 + SIGINT."""


def add(commands: Any) -> None:
    """Add `demo`."""
    command = add_command(commands, "demo", HELP, demo)
    kinds = command.add_mutually_exclusive_group()
    kinds.add_argument(
        "--serve",
        metavar="PORT",
        nargs="?",
        type=_port,
        const=DEFAULT_PORT,
        help=f"run a fleet, with /metrics on this PORT (default: {DEFAULT_PORT})",
    )
    kinds.add_argument(
        "--record",
        metavar="DIR",
        help="write a sample ledger to DIR/ledger.db, with DIR/limits.yaml and bills",
    )
    kinds.add_argument("--json", action="store_true", help="print JSON only")


def demo(options: Namespace) -> int:
    """Run the demo or write the sample ledger."""
    if options.record is not None:
        from otel_limits.demo.sample_fleet import record

        return record(options.record)
    if (missing := missing_framework()) is not None:
        return refuse([missing], FAILED)
    framework = installed_frameworks()[0]
    try:
        if options.serve is not None:
            from otel_limits.demo.serve import serve

            return serve(framework, options.serve)
        from otel_limits.demo.main import main as play

        return play(framework, None if options.json else console())
    except KeyboardInterrupt:
        return INTERRUPTED


def _port(text: str) -> int:
    try:
        return PORT.of_text("PORT", text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
