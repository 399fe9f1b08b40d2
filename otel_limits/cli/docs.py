"""The command `otel-limits docs`."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any, Final

import otel_limits.docs as pages
from otel_limits.cli.command import add_command, refuse
from otel_limits.cli.terminal import console
from otel_limits.core.secrets import quote_value
from otel_limits.core.wording import suggestion

HELP: Final = """\
Show a documentation page, or list all pages.

The pages match the installed version. Output to a pipe or file is Markdown:

  otel-limits docs limits | less
"""


def add(commands: Any) -> None:
    """Add `docs`."""
    command = add_command(commands, "docs", HELP, docs)
    command.add_argument("topic", nargs="?", metavar="TOPIC", help="page to show")


def docs(options: Namespace) -> int:
    """Show a page or list all pages."""
    topics = pages.topics()
    if options.topic is None:
        width = max(map(len, topics))
        for group, listed in pages.PAGES.items():
            sys.stdout.write(f"{group}:\n")
            for topic, line in listed.items():
                sys.stdout.write(f"  {topic:<{width}}  {line}\n")
        return 0
    if options.topic not in topics:
        hint = suggestion(options.topic, topics, f"Pages: {', '.join(topics)}.")
        return refuse([f"No page named {quote_value(options.topic)}. {hint}"])
    markdown = pages.page(options.topic)
    if sys.stdout.isatty():
        from rich.markdown import Markdown

        console().print(Markdown(markdown))
    else:
        sys.stdout.write(markdown)
    return 0
