"""The command `otel-limits docs`."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any, Final

from otel_limits import docs as pages
from otel_limits.cli.command import add_command, refuse
from otel_limits.cli.terminal import console, in_columns
from otel_limits.core.hints import closest_match
from otel_limits.core.secrets import redact_url

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
    """Show a page, or the list of pages."""
    topics = pages.topics()
    if options.topic is None:
        # The first line of a page is its title, so that a list of pages cannot be out of date.
        headings = [pages.page(topic).partition("\n")[0].lstrip("# ") for topic in topics]
        sys.stdout.write(in_columns(list(zip(topics, headings, strict=True))))
        return 0
    if options.topic not in topics:
        near = closest_match(options.topic, topics)
        hint = f"Did you mean {near}?" if near else f"There are: {', '.join(topics)}."
        return refuse([f"There is no page about {redact_url(options.topic)!r}. {hint}"])
    markdown = pages.page(options.topic)
    # Anything else gets Markdown, which another program can lay out better.
    if sys.stdout.isatty():
        from rich.markdown import Markdown

        console().print(Markdown(markdown))
    else:
        sys.stdout.write(markdown)
    return 0
