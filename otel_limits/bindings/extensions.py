"""Requests more budget from a human, and reads the answer: the words of all frameworks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, cast

from otel_limits.bindings.span_writer import json_value
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.labels import clean, quoted
from otel_limits.core.limits import LIMIT_NAMES, Breach, Limits
from otel_limits.core.origins import EXTENSION
from otel_limits.core.policy import Overrides, Policy, Verdict
from otel_limits.core.stop_json import breach_from_json
from otel_limits.core.texts import place_of, usage_of
from otel_limits.core.wording import closest_match

if TYPE_CHECKING:
    from otel_limits.core.events import Invocation

logger = logging.getLogger("otel_limits")

EXTEND: Final = "extend"
"""Key of the answer that raises limits."""

NUMBERS: Final = (int, float, Decimal)


def question(verdict: Verdict, invocation: Invocation) -> dict[str, Any]:
    """Describe the limit that was reached, and the agent.

    Frameworks store it as JSON, which has no type for a Decimal.
    """
    breach = cast("Breach", verdict.breach)
    return {
        "limit": breach.limit,
        "cap": json_value(breach.cap),
        "observed": json_value(breach.observed),
        "reason": breach.reason,
        "unit": breach.unit,
        "note": breach.note,
        "uncounted": breach.uncounted,
        "at_most": breach.at_most,
        "subject": breach.subject,
        "origin": breach.origin,
        "agent": invocation.agent,
        "invocation_id": invocation.id,
        "question": f"Agent {quoted(invocation.agent)} reached {usage_of(breach)}"
        f"{place_of(breach)} Answer {{'extend': {{{breach.limit!r}: N}}}} to allow N "
        f"more, or anything else to stop. Invocation ID: {invocation.id}.",
    }


NOT_ASKED: Final[set[tuple[str, str]]] = set()
"""Agents that were halted where a human should have been asked, and why."""


@suppress_errors("binding")
def report_not_asked(agent: str, reason: str) -> None:
    """Log, once for each agent, that no human could be asked.

    Args:
        agent: The name of the agent.
        reason: Why, as a clause that begins with "because", and what to do about it.
    """
    if (agent, reason) not in NOT_ASKED:
        NOT_ASKED.add((agent, reason))
        logger.warning(
            "otel-limits: agent %s is halted instead of asking, %s", quoted(agent), reason
        )


def extension_of(response: object) -> Limits | None:
    """Read `{"extend": {"max_turns": 20}}`. Return `None` for anything else or without a cap."""
    if not isinstance(response, Mapping) or not isinstance(response.get(EXTEND), Mapping):
        return None
    try:
        caps = {name: cap for name, cap in response[EXTEND].items() if cap not in (None, {})}
        return Limits(**caps) if caps else None
    # An answer can be any text that a person typed; invalid limits extend nothing.
    except (TypeError, ValueError):
        return None


def extend(policy: Policy, response: object) -> Policy:
    """Add the extension in a human's answer to a policy."""
    extension = extension_of(response)
    if extension is None:
        return policy
    return policy.overridden_by(Overrides(limits=extension, origin=EXTENSION))


def declined_verdict(asked: object, response: object) -> Verdict | None:
    """Return the halt after an answer; `None` if it extends a limit.

    Args:
        asked: The question.
        response: The answer.
    """
    if extension_of(response) is not None:
        return None
    breach = _breach_of(asked)
    problem = _problem_of(response, breach.limit)
    remark = f"The answer was not understood: {problem}" if problem else ""
    return Verdict(breach.reason, (breach,), remark=remark)


def _problem_of(response: object, asked: str) -> str:
    """Return why an answer that is meant as an extension is not one; empty if it is not meant so.

    Args:
        response: The answer.
        asked: The limit that was reached.
    """
    if isinstance(response, str) and response.lstrip().startswith("{"):
        return "it is text, not a mapping."
    if not isinstance(response, Mapping):
        return ""
    if EXTEND in response:
        return _problem_with(response[EXTEND] or {}, asked)
    for field in response:
        if closest_match(str(field), [EXTEND]):
            return _unknown(field, EXTEND)
        if closest_match(str(field), LIMIT_NAMES):
            return f"{clean(str(field))!r} must be within {EXTEND!r}."
    return ""


def _problem_with(more: object, asked: str) -> str:
    """Return why an extension is invalid; empty if it is valid, or has no cap."""
    if not isinstance(more, Mapping):
        return f"{EXTEND!r} must map limits to caps."
    unknown = next((each for each in more if each not in LIMIT_NAMES), None)
    if unknown is not None:
        return _unknown(unknown, closest_match(str(unknown), LIMIT_NAMES) or asked)
    try:
        Limits(**more)
    except ValueError as error:
        return str(error)
    return ""


def _unknown(field: object, near: str) -> str:
    """Return the problem with a field with an unknown name."""
    return f"{clean(str(field))!r} is unknown. Did you mean {near!r}?"


def _breach_of(asked: object) -> Breach:
    """Restore the breach of a question, which was stored with the application's sessions."""
    with contextlib.suppress(TypeError, AttributeError, ArithmeticError):
        breach = breach_from_json(cast("Any", asked))
        if all(isinstance(each, NUMBERS) for each in (breach.cap, breach.observed)):
            return breach
    # Even if it was damaged there, a question without approval ends the invocation.
    return Breach("max_turns", 0, 0, "max_turns", "turns")
