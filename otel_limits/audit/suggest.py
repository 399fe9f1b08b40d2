"""The question `suggest`: limits based on the recorded usage of each agent."""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from otel_limits.audit import parsing
from otel_limits.audit.answer import Answer
from otel_limits.audit.backtest import is_success
from otel_limits.audit.findings import command_on
from otel_limits.audit.question import SELECTION, AuditQuery, Option, Question
from otel_limits.audit.survival import Estimate, percentile
from otel_limits.core.events import CUT_SHORT
from otel_limits.core.limits import LOOP_LIMITS
from otel_limits.core.wording import pluralize

ROUND_TO: Final = 2
"""Digits of suggested token limits: more would suggest false precision."""


@dataclass(slots=True)
class UsageSamples:
    """Usage of the invocations of one agent, successful and halted."""

    turns: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    halted_turns: list[int] = field(default_factory=list)
    halted_tokens: list[int] = field(default_factory=list)
    loops: int = 0
    """Invocations that reached a loop limit, which indicate no need."""


def suggest(
    inquiry: AuditQuery, percentile: float, headroom: float, min_invocations: int
) -> Answer:
    """Answer with a policy file."""
    from otel_limits.ledger.whole_tasks import tasks

    inquiry.require_known()
    rows = inquiry.work.through(tasks(inquiry.connection, inquiry.selection))
    needs = collect(rows)
    is_enough = any(len(each.turns) >= min_invocations for each in needs.values())
    text = policy_file(
        needs,
        share=percentile,
        headroom=headroom,
        min_invocations=min_invocations,
        about=inquiry.about,
        instead=() if is_enough else _instead(inquiry, needs),
    )
    return Answer(
        question="suggest",
        title="Suggested limits",
        about=inquiry.about,
        text=text,
        summary=NONE_SUGGESTED if text.endswith(f"\n{EMPTY}\n") else "",
    )


def _instead(inquiry: AuditQuery, needs: Mapping[str, UsageSamples]) -> Sequence[str]:
    """Return comments with the commands to try if there is nothing to suggest."""
    from otel_limits.ledger.selection import Selection

    most = max((len(each.turns) for each in needs.values()), default=0)
    if most:
        again = command_on(inquiry, f"audit suggest --min-invocations {most}")
        return "# Record more invocations, or accept limits from fewer:", f"#   {again}"
    record = "#   otel-limits run -- python app.py"
    if inquiry.selection == Selection(zone=inquiry.selection.zone):
        return "# Record successful invocations:", record
    again = command_on(inquiry, "audit suggest")
    return "# None matches. Ask without other options, or record some:", f"#   {again}", record


def collect(rows: Iterable[Any]) -> dict[str, UsageSamples]:
    """Collect the usage of successful and halted invocations, by agent.

    Args:
        rows: Whole tasks, as limits count them.
    """
    needs: dict[str, UsageSamples] = {}
    for row in rows:
        each = needs.setdefault(row.agent, UsageSamples())
        # Input and output, like a token budget.
        tokens = row.input_tokens + row.output_tokens
        # Loops, failed and aborted invocations indicate no need, and are not counted. An observed
        # loop may have ended by itself, which looks like a success.
        if row.breach_limit in LOOP_LIMITS:
            each.loops += 1
        elif is_success(row):
            each.turns.append(row.turns)
            each.tokens.append(tokens)
        elif row.action in CUT_SHORT:
            each.halted_turns.append(row.turns)
            each.halted_tokens.append(tokens)
    # Agents with failures only are left out.
    return {
        agent: each
        for agent, each in needs.items()
        if each.turns or each.halted_turns or each.loops
    }


def with_headroom(value: int, headroom: float, digits: int | None = None) -> int:
    """Add headroom, and round up to an integer, or to a number of digits."""
    # Rounded first, as 10 * 1.1 is slightly more than 11 in binary, and would become 12.
    roomy = math.ceil(round(value * (1 + headroom), 6))
    if digits is None or roomy < 10**digits:
        return max(1, roomy)
    unit = int(10 ** (len(str(roomy)) - digits))
    return -(-roomy // unit) * unit


NONE: Final = "no successful invocation"
EMPTY: Final = "agents: {}"
"""The last line of a policy file without limits."""
NONE_SUGGESTED: Final = (
    "No limits suggested: this file halts nothing. OTEL_LIMITS_PRESET=recommended stops loops."
)


def policy_file(
    needs: Mapping[str, UsageSamples],
    *,
    share: float,
    headroom: float,
    min_invocations: int,
    about: str,
    instead: Iterable[str] = (),
) -> str:
    """Write a policy file with limits for each agent with enough successful invocations."""
    covered = f"{100 * share:g}% of an agent's invocations"
    lines = [
        f"# Suggested by otel-limits from {about}:",
        f"# limits that cover {covered}, plus {headroom:.0%} headroom.",
        "# A halted invocation counts as needing at least what it used.",
    ]
    for agent, each in sorted(needs.items()):
        if each.loops:
            loops = pluralize(each.loops, "invocation")
            lines.append(f"# Left out of {json.dumps(agent)}: {loops} that reached a loop limit.")
        if len(each.turns) < min_invocations:
            few = pluralize(len(each.turns), "successful invocation") if each.turns else NONE
            lines.append(f"# {json.dumps(agent)}: {few}, but {min_invocations} are needed.")
    agents = [
        line
        for agent, each in sorted(needs.items())
        if len(each.turns) >= min_invocations
        for line in _entry(agent, each, share, headroom)
    ]
    # Comments alone would leave a null where YAML needs a mapping.
    has_entry = any(not line.lstrip().startswith("#") for line in agents)
    lines += ["agents:", *agents] if has_entry else [*map(str.lstrip, agents), *instead, EMPTY]
    return "\n".join(lines) + "\n"


def _entry(agent: str, needs: UsageSamples, share: float, headroom: float) -> Iterator[str]:
    # Separately: the invocation with the most turns is rarely the one with the most tokens.
    turns = percentile(needs.turns, needs.halted_turns, share)
    tokens = percentile(needs.tokens, needs.halted_tokens, share)
    if turns.value is None or tokens.value is None:
        yield from _unknown(agent, needs, share)
        return
    seen = pluralize(len(needs.turns), "invocation")
    if needs.halted_turns:
        halted = pluralize(len(needs.halted_turns), "halted invocation")
        seen = f"{len(needs.turns):,} successful and {halted}"
    if not tokens.value:  # a cap of 1 would halt the first call with tokens
        yield f"  # {json.dumps(agent)}: no tokens in {seen}, so there is no limit to suggest."
        return
    caps = (
        f"max_turns: {with_headroom(turns.value, headroom)}, "
        f"max_token_budget: {with_headroom(tokens.value, headroom, ROUND_TO)}"
    )
    # As JSON, which YAML includes: names may have any characters. Escaped, as keys are globs.
    yield f"  {json.dumps(glob.escape(agent))}:  # from {seen}"
    yield f"    # {_interval(turns)} turns, {_interval(tokens)} tokens"
    yield f"    limits: {{{caps}}}"


def _unknown(agent: str, needs: UsageSamples, share: float) -> Iterator[str]:
    """Explain why there is no limit: too low a cap does not show what is needed."""
    halted, all_ = len(needs.halted_turns), len(needs.turns) + len(needs.halted_turns)
    of_all = pluralize(all_, "invocation was halted or killed", "invocations were halted or killed")
    turns = pluralize(max(needs.halted_turns), "turn")
    tokens = pluralize(max(needs.halted_tokens), "token")
    yield f"  # {json.dumps(agent)}: {halted:,} of {of_all}, so the limit"
    yield f"  # that covers {100 * share:g}% is unknown, but above {turns} or {tokens}."
    yield "  # Record for a while with a higher cap, or with the action observe."


def _interval(estimate: Estimate) -> str:
    high = "or more" if estimate.high is None else f"to {estimate.high:,}"
    return f"{estimate.value:,} (95% interval: {estimate.low:,} {high})"


SUGGEST: Final = Question(
    name="suggest",
    help="Suggest a policy file from recorded usage.",
    answer=suggest,
    options=(
        Option(
            "--percentile",
            "PERCENT",
            parsing.percentile,
            "percentile of invocations the limits must cover, e.g. 99, 99% or 0.99 (default: 99)",
            default=0.99,
        ),
        Option(
            "--headroom",
            "SHARE",
            parsing.share,
            "margin added to the percentile (default: 20%)",
            default=0.2,
        ),
        Option(
            "--min-invocations",
            "N",
            parsing.cap,
            "minimum successful invocations per agent (default: 20)",
            default=20,
        ),
    ),
    selection=SELECTION,
)
