"""How a command joins the command line, and how it says that it cannot do what was asked."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

from otel_limits.cli.examples import example_of
from otel_limits.core.hints import closest_match
from otel_limits.core.secrets import redact_text, redact_url

USAGE_ERROR: Final = 2
"""Exit status for what cannot be done as it was typed; argparse uses the same."""


WIDEST: Final = 102
"""Columns from which on lines of a help would be too long to be read."""

INVALID_CHOICE: Final = re.compile(r"invalid choice: '(.*?)'")
"""How argparse begins to say that a word is none of those that may stand there."""


class Parser(ArgumentParser):
    """Reads the arguments of a command, and asks about an option that is almost one of its own."""

    def parse_known_args(  # type: ignore[override]  # overloads, for the kind of namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Refuse what is unknown here, as only the command itself knows its options."""
        self._typed = list(sys.argv[1:] if args is None else args)
        options, unknown = super().parse_known_args(args, namespace)
        # argparse would have the uppermost parser refuse it, which knows no option of the command.
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """End with status 2 and a sentence: a required option may be missing as it is misspelt."""
        choice = INVALID_CHOICE.search(message)
        near = self._nearest() if choice is None else closest_match(choice[1], self._choices())
        message = redact_text(message, self._typed)  # argparse quotes what it does not know
        super().error(f"{message.rstrip('.')}. Did you mean {near}?" if near else message)

    def _choices(self) -> list[str]:
        """Return every word that may stand in some place of this command, commands included."""
        # There is no public list of what a parser takes.
        return [str(word) for action in self._actions for word in action.choices or ()]

    def _nearest(self) -> str | None:
        """Return the option that the first unknown one is near; a program's own stand behind it."""
        for word in self._typed:
            name = word.partition("=")[0]
            # There is no public list of a parser's options.
            is_number = name[1:2].isdigit()  # -1 is a value, however near it is to -h
            if name.startswith("-") and not is_number and name not in self._option_string_actions:
                # Behind a `--` stands a program with options of its own, which is none of our
                # business.
                return None if name == "--" else closest_match(name, self._option_string_actions)
        return None


def add_command(
    commands: Any, name: str, text: str, call: Callable[[Namespace], int]
) -> ArgumentParser:
    """Add a command.

    Args:
        commands: Where it belongs on the command line.
        name: What is typed.
        text: Its help, laid out; the first line stands in the list of commands.
        call: What it does; returns the exit status.
    """
    command: ArgumentParser = commands.add_parser(
        name,
        help=text.split("\n", 1)[0],
        description=laid_out(text),
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    command.epilog = example_of(command.prog)
    command.set_defaults(call=call)
    return command


class HelpFormatter(RawDescriptionHelpFormatter):
    """Leaves commands and options whole, which have hyphens: to be found, and to be copied."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        # argparse has no public name for it; where it is gone, names are cut again, and no more.
        words = " ".join(text.split())
        return textwrap.wrap(words, width, break_on_hyphens=False, break_long_words=False)


def laid_out(text: str) -> str:
    """Wrap the paragraphs of a help for the terminal; indented lines stay, to be copied."""
    # As wide as argparse makes the options below, which is its own rule and not to be asked for.
    width = min(shutil.get_terminal_size().columns, WIDEST) - 2
    return "\n\n".join(
        paragraph
        if paragraph.startswith(" ")
        else textwrap.fill(paragraph, width, break_on_hyphens=False)
        for paragraph in text.strip().split("\n\n")
    )


def add_group(commands: Any, name: str, text: str) -> Any:
    """Add a command that only has commands of its own; return where those belong."""

    def show_help(_options: Namespace) -> int:
        group.print_help(sys.stderr)
        return USAGE_ERROR

    group = add_command(commands, name, text, show_help)
    return group.add_subparsers(title="commands", metavar="COMMAND")


def file_name(text: str) -> str:
    """Read the name of a file: nobody means one by an address, which may hold a password.

    Raises:
        ArgumentTypeError: It is an address.
    """
    if redact_url(text) != text:
        raise ArgumentTypeError(f"{redact_url(text)!r} is an address, and not the name of a file")
    return text


def refuse(sentences: Sequence[str], status: int = USAGE_ERROR) -> int:
    """Say on standard error why something cannot be done, a line for each sentence."""
    for sentence in sentences:
        sys.stderr.write(f"otel-limits: {sentence}\n")
    return status
