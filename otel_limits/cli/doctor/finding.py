"""Findings of `check` and `doctor`, and how they are printed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

INDENT: Final = " " * 6

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


def as_text(findings: Sequence[Finding]) -> str:
    """Format one line per finding, followed by its advice."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<4}  {finding.name:<{width}}  {finding.text}")
        # JSON includes the advice of passed checks.
        if finding.advice and finding.status != "ok":
            lines.append(f"{INDENT}{'':<{width}}  -> {finding.advice}")
    text = "".join(f"{line}\n" for line in lines)
    # A build log may not support other characters.
    return text.encode("ascii", "backslashreplace").decode()


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
