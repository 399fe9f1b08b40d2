"""The question `suggest`: limits from what the invocations of each agent needed."""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from otel_limits.audit import asking
from otel_limits.audit.answers import Answer
from otel_limits.audit.backtest import is_success
from otel_limits.audit.question import AGENT, SELECTION, Inquiry, Option, Question
from otel_limits.audit.survival import Estimate, percentile
from otel_limits.core.events import HALTED
from otel_limits.core.wording import pluralize

ROUND_TO: Final = 2
"""Digits of a suggested number of tokens: more would claim a precision that is not there."""


@dataclass(slots=True)
class Needs:
    """What the invocations of one agent used: the successful ones, and those that were halted."""

    turns: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    halted_turns: list[int] = field(default_factory=list)
    halted_tokens: list[int] = field(default_factory=list)


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
    """Gather what successful invocations used, and how far the halted ones came, by agent."""
    needs: dict[str, Needs] = {}
    for row in rows:
        each = needs.setdefault(row.agent, Needs())
        # Input and output, as a budget of tokens counts them.
        tokens = row.input_tokens + row.output_tokens
        # What failed or was aborted says nothing of what is enough: it counts neither way.
        if is_success(row):
            each.turns.append(row.turns)
            each.tokens.append(tokens)
        elif row.action in HALTED:
            each.halted_turns.append(row.turns)
            each.halted_tokens.append(tokens)
    # An agent of failures alone would get a line that says nothing.
    return {agent: each for agent, each in needs.items() if each.turns or each.halted_turns}


def with_room(value: int, head_room: float, digits: int | None = None) -> int:
    """Add head-room, and round up: to whole numbers, or to so many digits."""
    # Rounded first, as 10 * 1.1 is a little more than 11 in binary, and would become 12.
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
        f"# what {100 * share:g}% of an agent's invocations need at most, plus {head_room:.0%}.",
        "# A halted invocation needed at least what it had used.",
    ]
    for agent, each in sorted(needs.items()):
        if len(each.turns) < enough:
            few = pluralize(
                len(each.turns), "successful invocation is", "successful invocations are"
            )
            lines.append(
                f"# {json.dumps(agent)}: {few} too few, {pluralize(enough, 'is', 'are')} enough."
            )
    agents = [
        line
        for agent, each in sorted(needs.items())
        if len(each.turns) >= enough
        for line in _entry(agent, each, share, head_room)
    ]
    # Lines of comments alone would leave nothing where YAML wants a mapping.
    has_entry = any(not line.lstrip().startswith("#") for line in agents)
    lines += ["agents:", *agents] if has_entry else ["agents: {}", *agents]
    return "\n".join(lines) + "\n"


def _entry(agent: str, needs: Needs, share: float, head_room: float) -> Iterator[str]:
    # Each by itself: the invocation with most turns is seldom that with most tokens.
    turns = percentile(needs.turns, needs.halted_turns, share)
    tokens = percentile(needs.tokens, needs.halted_tokens, share)
    if turns.value is None or tokens.value is None:
        yield from _unknown(agent, needs, share)
        return
    seen = pluralize(len(needs.turns), "invocation")
    if needs.halted_turns:
        halted = pluralize(len(needs.halted_turns), "halted invocation")
        seen = f"{len(needs.turns):,} successful and {halted}"
    caps = (
        f"max_turns: {with_room(turns.value, head_room)}, "
        f"max_token_budget: {with_room(tokens.value, head_room, ROUND_TO)}"
    )
    # As JSON, which is YAML as well: a name may have any characters. Escaped, as the file has
    # globs.
    yield f"  {json.dumps(glob.escape(agent))}:  # from {seen}"
    yield f"    # {_interval(turns)} turns, {_interval(tokens)} tokens"
    yield f"    limits: {{{caps}}}"


def _unknown(agent: str, needs: Needs, share: float) -> Iterator[str]:
    """Why there is no limit: a cap that was too low says nothing about one that is enough."""
    halted, all_ = len(needs.halted_turns), len(needs.turns) + len(needs.halted_turns)
    of_all = pluralize(all_, "invocation was halted", "invocations were halted")
    turns = pluralize(max(needs.halted_turns), "turn")
    tokens = pluralize(max(needs.halted_tokens), "token")
    yield f"  # {json.dumps(agent)}: {halted:,} of {of_all}. So it"
    yield f"  # is not known what {100 * share:g}% need: more than {turns} or {tokens}."
    yield "  # Let them go on for a while with a higher cap, or with the action observe."


def _interval(estimate: Estimate) -> str:
    high = "more than was seen" if estimate.high is None else f"{estimate.high:,}"
    return f"{estimate.value:,} (95 % interval: {estimate.low:,} to {high})"


SUGGEST: Final = Question(
    name="suggest",
    help="A policy file with limits from what invocations needed.",
    answer=suggest,
    options=(
        Option(
            "--percentile",
            "PERCENT",
            asking.percentile,
            "share of the invocations for which the limits are to be enough, as 99, 99% or 0.99 "
            "(default: 99)",
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
