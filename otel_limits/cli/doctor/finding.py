"""What the doctor finds: one line of its report each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

FindingStatus: TypeAlias = Literal["ok", "FAIL", "-"]
"""`-` stands for what is not configured, so that there is nothing to be found."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    status: FindingStatus
    name: str
    """What was looked at, in a word or two."""
    text: str
    """What was found."""
    advice: str = ""
    """What to do about it."""


def ok(name: str, text: str, advice: str = "") -> Finding:
    """It is as it should be."""
    return Finding("ok", name, text, advice)


def fail(name: str, text: str, advice: str = "") -> Finding:
    """It is not as it should be."""
    return Finding("FAIL", name, text, advice)


def skipped(name: str, text: str, advice: str = "") -> Finding:
    """It is not configured."""
    return Finding("-", name, text, advice)
