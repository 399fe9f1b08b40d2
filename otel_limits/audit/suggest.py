"""The question `suggest`: limits from what the successful invocations of each agent needed."""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from otel_limits.audit import asking
from otel_limits.audit.answers import Answer
from otel_limits.audit.backtest import is_success
from otel_limits.audit.question import AGENT, SELECTION, Inquiry, Option, Question

ROUND_TO: Final = 2
"""Digits of a suggested number of tokens: more would claim a precision that is not there."""


@dataclass(slots=True)
class Needs:
    """What the successful invocations of one agent used."""

    turns: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def suggest(inquiry: Inquiry, percentile: float, head_room: float, enough: int) -> Answer:
    """Answer with a policy file."""
    from otel_limits.ledger.queries import invocations

    inquiry.require_known()
    rows = inquiry.work.through(invocations(inquiry.connection, inquiry.selection))
    text = policy_file(
        collect(rows), share=percentile, head_room=head_room, enough=enough, about=inquiry.about
    )
    return Answer(question="suggest", title="Suggested limits", about=inquiry.about, text=text)


def collect(rows: Iterable[Any]) -> dict[str, Needs]:
    """Gather what successful invocations used, by agent."""
    needs: dict[str, Needs] = {}
    for row in rows:
        if is_success(row):
            each = needs.setdefault(row.agent, Needs())
            each.turns.append(row.turns)
            each.tokens.append(row.input_tokens + row.output_tokens)
    return needs


def quantile(values: Sequence[int], share: float) -> int:
    """The smallest value that at least `share` of all values do not exceed."""
    return sorted(values)[max(1, math.ceil(share * len(values))) - 1]


def with_room(value: int, head_room: float, digits: int | None = None) -> int:
    """Add head-room, and round up: to whole numbers, or to so many digits."""
    roomy = math.ceil(round(value * (1 + head_room), 6))
    if digits is None or roomy < 10**digits:
        return max(1, roomy)
    unit = int(10 ** (len(str(roomy)) - digits))
    return -(-roomy // unit) * unit


def policy_file(
    needs: Mapping[str, Needs], *, share: float, head_room: float, enough: int, about: str
) -> str:
    """Write a policy file with limits for each agent that succeeded often enough."""
    lines = [
        f"# Suggested by otel-limits from {about}:",
        f"# {share:.0%} of an agent's successful invocations kept within these, less the",
        f"# {head_room:.0%} of head-room.",
    ]
    lines += [
        f"# {json.dumps(agent)}: {len(each.turns)} successful invocations are too few, {enough} "
        f"are enough."
        for agent, each in sorted(needs.items())
        if len(each.turns) < enough
    ]
    agents = [
        line
        for agent, each in sorted(needs.items())
        if len(each.turns) >= enough
        for line in _entry(agent, each, share, head_room)
    ]
    lines += ["agents:", *agents] if agents else ["agents: {}"]
    return "\n".join(lines) + "\n"


def _entry(agent: str, needs: Needs, share: float, head_room: float) -> list[str]:
    turns = with_room(quantile(needs.turns, share), head_room)
    tokens = with_room(quantile(needs.tokens, share), head_room, ROUND_TO)
    seen = f"{len(needs.turns)} invocations, up to {max(needs.turns)} turns and {max(needs.tokens)}"
    return [
        f"  {json.dumps(glob.escape(agent))}:  # from {seen} tokens",
        f"    limits: {{max_turns: {turns}, max_token_budget: {tokens}}}",
    ]


SUGGEST: Final = Question(
    name="suggest",
    help="A policy file with limits from what successful invocations needed.",
    answer=suggest,
    options=(
        Option(
            "--percentile",
            "SHARE",
            asking.share,
            "share of the successful invocations to keep (default: 99%)",
            default=0.99,
        ),
        Option("--head-room", "SHARE", asking.share, "added on top (default: 20%)", default=0.2),
        Option(
            "--enough",
            "N",
            asking.cap,
            "successful invocations that an agent needs for a suggestion (default: 20)",
            default=20,
        ),
    ),
    selection=(*SELECTION, AGENT),
)
