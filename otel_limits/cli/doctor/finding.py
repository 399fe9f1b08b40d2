"""Findings, the lines of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

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
