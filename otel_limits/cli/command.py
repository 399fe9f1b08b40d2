"""Helpers for defining commands: parser, help formatting, examples and error messages."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
import shutil
import sys
import textwrap
from argparse import (
    Action,
    ArgumentParser,
    ArgumentTypeError,
    BooleanOptionalAction,
    Namespace,
    RawDescriptionHelpFormatter,
    _SubParsersAction,
)
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

from otel_limits.core.secrets import quote_value, redact_text, redact_url
from otel_limits.core.wording import closest_match

# --- Example command lines, shown in the help of commands without their own -----------------------

EXAMPLES: Final[Mapping[str, str]] = {
    "otel-limits": "otel-limits run --max-turns 30 -- python app.py",
    "otel-limits autoload": "otel-limits autoload install",
    "otel-limits autoload install": "otel-limits autoload install",
    "otel-limits autoload status": "otel-limits autoload status",
    "otel-limits autoload remove": "otel-limits autoload remove",
    "otel-limits check": "otel-limits check --agent research-assistant",
    "otel-limits demo": "otel-limits demo",
    "otel-limits audit": "otel-limits audit spend --by agent --since 7d",
    "otel-limits audit spend": "otel-limits audit spend --by agent,model --since 30d",
    "otel-limits audit stops": "otel-limits audit stops --since 7d",
    "otel-limits audit show": "otel-limits audit show 4bf92f3577b34da6",
    "otel-limits audit loops": "otel-limits audit loops --since 7d",
    "otel-limits audit reconcile": "otel-limits audit reconcile --prometheus http://localhost:9090",
    "otel-limits audit backtest": "otel-limits audit backtest --max-turns 20 --since 30d",
    "otel-limits audit suggest": "otel-limits audit suggest --since 30d",
    "otel-limits audit anomalies": "otel-limits audit anomalies --since 30d",
    "otel-limits audit grants": "otel-limits audit grants --since 30d",
    "otel-limits audit budget": "otel-limits audit budget --policy limits.yaml",
    "otel-limits audit policies": "otel-limits audit policies --since 7d",
    "otel-limits audit whois": "otel-limits audit whois joe",
    "otel-limits audit unmeasured": "otel-limits audit unmeasured --since 7d",
    "otel-limits audit verify": "otel-limits audit verify",
    "otel-limits audit schema": "otel-limits audit schema spend",
    "otel-limits ledger": "otel-limits ledger prune --older-than 90d",
    "otel-limits ledger prune": "otel-limits ledger prune --older-than 90d",
    "otel-limits ledger export": "otel-limits ledger export --format csv --output calls.csv",
    "otel-limits ledger import": "otel-limits ledger import spans.jsonl",
    "otel-limits ledger reprice": "otel-limits ledger reprice --since 30d",
    "otel-limits ledger adopt": "otel-limits ledger adopt lost.spill --into ledger.db",
    "otel-limits ledger close": "otel-limits ledger close --month 2026-10 "
    "--after september.json > october.json",
    "otel-limits ledger accept": "otel-limits ledger accept 'ledger.db.spill-7-1a2b.damaged' "
    "--reason 'disk replaced, lines unreadable'",
    "otel-limits ledger merge": "otel-limits ledger merge node-1.db node-2.db --into all.db",
    "otel-limits ledger end-lost": "otel-limits ledger end-lost --older-than 1d",
    "otel-limits dashboards": "otel-limits dashboards export grafana",
    "otel-limits dashboards export": "otel-limits dashboards export grafana",
    "otel-limits quotas": "otel-limits quotas --top 10 --key acme",
    "otel-limits quotas reset": "otel-limits quotas reset tenants acme",
    "otel-limits quotas revoke": "otel-limits quotas revoke tenants acme",
    "otel-limits quotas unset": "otel-limits quotas unset tenants acme",
    "otel-limits quotas unblock": "otel-limits quotas unblock tenants acme",
    "otel-limits docs": "otel-limits docs limits",
    "otel-limits top": "otel-limits top --scrape http://localhost:9464/metrics",
}
"""By command name. Commands that are missing show an example within their help."""


def example_of(command: str) -> str | None:
    """Return the example at the end of a command's help, if any."""
    line = EXAMPLES.get(command)
    return None if line is None else f"example:\n  {line}"


# --- Helpers for defining commands: parser, help formatting and error messages --------------------

USAGE_ERROR: Final = 2
"""Exit status for invalid arguments, the same as argparse's."""

MAX_HELP_WIDTH: Final = 102
"""Longer lines of help text are hard to read."""

HELP_COLUMN: Final = 36
"""Rightmost column at which the descriptions of options start."""

INVALID_CHOICE: Final = re.compile(r"invalid choice: '(.*?)'")
"""How argparse reports an unknown command or choice."""


TRUTH_VALUES: Final = frozenset({"true", "false", "yes", "no", "on", "off", "1", "0"})
"""Values of the environment variables of switches; their options take none."""


OF_BYTES: Final = frozenset(
    {"FILE", "DIR", "PATH", "PATH|URL", "ADDRESS", "OTHER", "PROGRAM", "LAUNCHER"}
)
"""Placeholders of arguments that name files or programs."""

SURROGATE: Final = re.compile("[\ud800-\udfff]")
"""How Python decodes a byte of an argument that is not UTF-8 (PEP 383)."""


def _texts(value: object) -> Iterator[str]:
    """Yield the texts of an argument, which may be repeated or parsed."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each)
    elif dataclasses.is_dataclass(value):
        yield from _texts([getattr(value, each.name) for each in dataclasses.fields(value)])


class Parser(ArgumentParser):
    """A command's argument parser that suggests the closest option for a misspelled one."""

    def parse_known_args(  # type: ignore[override]  # overloads, for the kind of namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Reject unknown arguments here, where the command's options are known."""
        self._typed = list(sys.argv[1:] if args is None else args)
        self._refuse_value_of_switch()
        options, unknown = super().parse_known_args(args, namespace)
        # argparse would report them from the top-level parser, which has none of these options.
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        self._refuse_bytes(options)
        return options, unknown

    def _refuse_bytes(self, options: Namespace) -> None:
        """Exit if a value has a byte that is not UTF-8: databases, servers and reports have text.

        Names of files may have any byte, and so may the arguments of a program.
        """
        for action in self._actions:
            if action.metavar in OF_BYTES:
                continue
            for text in _texts(getattr(options, action.dest, None)):
                if SURROGATE.search(text):
                    self.error(f"{quote_value(text)} is not UTF-8 text")

    def _refuse_value_of_switch(self) -> None:
        """Exit if a switch is followed by a value, which would be taken for the program to run."""
        at = 0
        while at < len(self._typed):
            name, equals, value = self._typed[at].partition("=")
            action = self._option_string_actions.get(name)
            if action is None:
                return  # the program, or what argparse will reject
            following = self._typed[at + 1] if at + 1 < len(self._typed) else ""
            is_switch = isinstance(action, BooleanOptionalAction)
            if is_switch and (equals or self._is_value(following)):
                on, off = action.option_strings
                self.error(
                    f"{name} takes no value, got {quote_value(value or following)}. Write {on} to "
                    f"switch it on, {off} to switch it off, and -- before a program of that name"
                )
            at += 1 if is_switch or equals or action.nargs == 0 else 2

    @staticmethod
    def _is_value(word: str) -> bool:
        """Return whether a word after a switch is meant as its value, not as a program."""
        is_program = not word or word.startswith("-") or shutil.which(word) is not None
        return word.lower() in TRUTH_VALUES or not is_program

    def error(self, message: str) -> NoReturn:
        """Exit with status 2, suggesting a correction: a missing option may be a misspelled one."""
        choice = INVALID_CHOICE.search(message)
        option = self._unknown_option()
        if choice is None:
            near = option and closest_match(option, self._option_string_actions)
        else:
            # argparse has no public list of a parser's arguments.
            words = [str(word) for action in self._actions for word in action.choices or ()]
            near = closest_match(choice[1], words)
            if option is not None and near is None:  # its value was taken for the command
                message = f"{option} belongs after the command: {self.prog} COMMAND {option} ..."
        message = redact_text(message, self._typed)  # argparse quotes unknown arguments
        super().error(f"{message.rstrip('.')}. Did you mean {near}?" if near else message)

    def _unknown_option(self) -> str | None:
        """Return the first unknown option, ignoring everything after `--`."""
        for word in self._typed:
            name = word.partition("=")[0]
            is_number = name[1:2].isdigit()  # -1 is a value, although it resembles -h
            if name.startswith("-") and not is_number and name not in self._option_string_actions:
                # After `--`, options belong to the user's program.
                return None if name == "--" else name
        return None


class HelpFormatter(RawDescriptionHelpFormatter):
    """A formatter that fits many options on a screen and never breaks a command or option."""

    # argparse documents none of these methods. Without them, help is longer but still correct.

    def __init__(self, prog: str) -> None:
        """Leave room for long options next to their descriptions."""
        width = min(shutil.get_terminal_size().columns, MAX_HELP_WIDTH) - 2
        super().__init__(prog, max_help_position=min(HELP_COLUMN, width // 2), width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        words = " ".join(text.split())
        return textwrap.wrap(words, width, break_on_hyphens=False, break_long_words=False)

    def _format_action_invocation(self, action: Action) -> str:
        if isinstance(action, BooleanOptionalAction):
            return action.option_strings[0].replace("--", "--[no-]", 1)
        return super()._format_action_invocation(action)

    def _format_action(self, action: Action) -> str:
        if isinstance(action, _SubParsersAction):  # its commands, without a line for itself
            return self._join_parts(
                [self._format_action(each) for each in action._get_subactions()]  # noqa: SLF001
            )
        return super()._format_action(action)


def add_command(
    commands: Any, name: str, text: str, call: Callable[[Namespace], int]
) -> ArgumentParser:
    """Add a command.

    Args:
        commands: The group or parser to add it to.
        name: The command as typed.
        text: Its help. The first line also appears in the list of commands.
        call: The function that runs it and returns the exit status.
    """
    command: ArgumentParser = commands.add_parser(
        name,
        help=text.split("\n", 1)[0],
        description=wrap_help(text),
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    command.epilog = example_of(command.prog)
    command.set_defaults(call=call)
    return command


def wrap_help(text: str) -> str:
    """Wrap the paragraphs of a help text; indented lines, which users copy, stay as they are."""
    # As wide as the options below.
    width = min(shutil.get_terminal_size().columns, MAX_HELP_WIDTH) - 2
    return "\n\n".join(
        paragraph
        if paragraph.startswith(" ")
        else textwrap.fill(paragraph, width, break_on_hyphens=False)
        for paragraph in text.strip().split("\n\n")
    )


def add_group(commands: Any, name: str, text: str) -> Any:
    """Add a command that consists of subcommands; return the group to add them to."""

    def show_help(_options: Namespace) -> int:
        group.print_help(sys.stderr)
        return USAGE_ERROR

    group = add_command(commands, name, text, show_help)
    return group.add_subparsers(title="commands", metavar="COMMAND")


def without_separator(words: list[str]) -> list[str]:
    """Return the words of a program, without the `--` that argparse leaves before them."""
    return words[1:] if words[:1] == ["--"] else words


def file_name(text: str) -> str:
    """Parse a file name. A URL is rejected: it may contain a password, and names no file.

    Raises:
        ArgumentTypeError: It is a URL.
    """
    if re.match(r"[\w.+-]+://", text) or redact_url(text) != text:
        raise ArgumentTypeError(f"{quote_value(text)} is a URL, not a file name")
    return text


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Suspend garbage collection.

    Modules and rows of a ledger have no cycles, and the search takes up to 1/6 of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def refuse(sentences: Sequence[str], status: int = USAGE_ERROR) -> int:
    """Print one error message per line on standard error; return the exit status."""
    for sentence in sentences:
        sys.stderr.write(f"otel-limits: {sentence}\n")
    return status
