"""Findings of `check` and `doctor`, and the application that they are about."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from otel_limits.bindings.entry_points import installed_entry_points
from otel_limits.bindings.known import importable_frameworks, know
from otel_limits.settings.policy.file import PolicyFile
from otel_limits.settings.settings_reader import read_settings

if TYPE_CHECKING:
    from otel_limits.bindings.entry_points import Installed
    from otel_limits.bindings.framework import Framework
    from otel_limits.cli.doctor.launcher import Launcher, UnknownLauncherError
    from otel_limits.core.policy import Policy
    from otel_limits.settings.policy.document import Document
    from otel_limits.settings.settings_reader import Reading
    from otel_limits.settings.table import Settings


INDENT: Final = " " * 6
NARROWEST: Final = 30
"""Columns of text, at least; narrower ones would break every sentence into words."""

FindingStatus: TypeAlias = Literal["ok", "warn", "FAIL", "-"]
"""`-`: not configured."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    status: FindingStatus
    name: str
    """The check, in a word or two."""
    text: str
    advice: str = ""
    """How to fix it."""


def ok(name: str, text: str, advice: str = "") -> Finding:
    """Create a finding of a passed check."""
    return Finding("ok", name, text, advice)


def warn(name: str, text: str, advice: str = "") -> Finding:
    """Create a finding of something that works now, and needs attention."""
    return Finding("warn", name, text, advice)


def fail(name: str, text: str, advice: str = "") -> Finding:
    """Create a finding of a failed check."""
    return Finding("FAIL", name, text, advice)


def skipped(name: str, text: str, advice: str = "") -> Finding:
    """Create a finding of something that is not configured."""
    return Finding("-", name, text, advice)


def exit_status(findings: Sequence[Finding]) -> int:
    """Return 1 if a check has failed, else 0."""
    return int(any(finding.status == "FAIL" for finding in findings))


def as_sentences(findings: Sequence[Finding]) -> list[str]:
    """Format what needs attention as one sentence each, with its advice."""
    return [
        f"{finding.text} {finding.advice}".rstrip()
        for finding in findings
        if finding.status in ("warn", "FAIL")
    ]


def as_text(findings: Sequence[Finding], columns: int | None = None) -> str:
    """Format one line per finding, followed by its advice; wrapped if a terminal has `columns`."""
    width = max(len(finding.name) for finding in findings)
    start = len(f"{INDENT}{'':<{width}}  ")
    lines: list[str] = []
    for finding in findings:
        parts = [f"{finding.status:<4}  {finding.name:<{width}}  {finding.text}"]
        # JSON includes the advice of passed checks.
        if finding.advice and finding.status != "ok":
            parts.append(f"{INDENT}{'':<{width}}  -> {finding.advice}")
        for part in parts:
            lines += [part] if columns is None else wrapped_from(part, start, columns)
    text = "".join(f"{line}\n" for line in lines)
    # A build log may not support other characters.
    return text.encode("ascii", "backslashreplace").decode()


def wrapped_from(line: str, column: int, columns: int) -> list[str]:
    """Wrap the text that starts at a column; paths and commands stay whole where they fit."""
    return textwrap.wrap(
        line,
        max(columns, column + NARROWEST),
        subsequent_indent=" " * column,
        break_long_words=False,
        break_on_hyphens=False,
    )


def as_json(findings: Sequence[Finding]) -> str:
    """Format the findings as JSON."""
    return (
        json.dumps(
            {
                "ok": not exit_status(findings),
                "findings": [dataclasses.asdict(finding) for finding in findings],
            },
            indent=2,
        )
        + "\n"
    )


# --- the examined application ---------------------------------------------------------------------


@dataclass(frozen=True)
class Context:
    """An application, as its environment and the arguments of the command describe it."""

    environ: Mapping[str, str]
    """Its variables."""
    agent: str | None = None
    """The only agent of interest."""
    probe: bool = False
    """Whether to import the frameworks."""
    model: str | None = None
    """A model ID that must have a price."""
    launcher: Launcher | UnknownLauncherError | None = None
    """The command that starts it."""

    @cached_property
    def reading(self) -> Reading:
        """Its settings with their sources and mistakes."""
        return read_settings(self.environ)

    @property
    def settings(self) -> Settings:
        """Its settings."""
        return self.reading.settings

    @cached_property
    def policy_file(self) -> PolicyFile:
        """Its policy file."""
        return PolicyFile(self.settings.policy_path)

    @property
    def document(self) -> Document:
        """The content of its policy file."""
        return self.policy_file.document

    @cached_property
    def policies(self) -> Mapping[str, Policy]:
        """The policy of the agent of interest; else that of each entry and of all other agents."""
        base = self.settings.policy
        if self.agent is None:
            return self.document.policies(base)
        return {self.agent: self.document.effective(self.agent, base)}

    @property
    def has_limit(self) -> bool:
        """Whether any of these agents has a limit."""
        return any(each.is_capped for each in self.policies.values()) or bool(self.document.quotas)

    @cached_property
    def third_party(self) -> Installed:
        """The frameworks that other distributions limit here."""
        return installed_entry_points()

    @cached_property
    def frameworks(self) -> Sequence[Framework]:
        """The frameworks that programs of this environment would import."""
        know(self.third_party.entry_points)
        return importable_frameworks()
