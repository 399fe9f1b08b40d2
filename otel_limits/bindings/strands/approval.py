"""Requests more budget from a human through an interrupt, and reads the answer."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Final, cast

from strands.interrupt import Interrupt, InterruptException

from otel_limits.bindings.span_writer import json_value
from otel_limits.bindings.strands.private import interrupt_state
from otel_limits.core.labels import clean
from otel_limits.core.limits import LIMIT_NAMES, Breach, Limits
from otel_limits.core.origins import EXTENSION
from otel_limits.core.policy import Overrides, Policy, Verdict
from otel_limits.core.stop_json import breach_from_json
from otel_limits.core.texts import place_of, usage_of
from otel_limits.core.wording import closest_match

if TYPE_CHECKING:
    from strands.agent.agent import Agent
    from strands.hooks import AfterInvocationEvent

    from otel_limits.core.events import Invocation

NAME: Final = "otel_limits"
"""Name of our interrupts, and the prefix of their IDs."""

EXTEND: Final = "extend"
"""Key of the answer that raises limits."""

NUMBERS: Final = (int, float, Decimal)


def is_unanswered(event: AfterInvocationEvent) -> bool:
    """Return whether a hook resumes a leg that ended with our question without answering it.

    Strands raises an exception for that, which the hook would never get without otel-limits.
    """
    interrupts = (event.result and event.result.interrupts) or ()
    # Each of them must be answered; the last one is certainly ours.
    asked = [each.id for each in interrupts if each.name == NAME]
    return bool(asked) and not _answers(event.resume, asked[-1])


def _answers(resume: object, question_id: str) -> bool:
    """Return whether a hook resumes only with answers, including one to a question."""
    if not isinstance(resume, list) or not all(isinstance(each, Mapping) for each in resume):
        return False
    answers = [each.get("interruptResponse") for each in resume]
    ids = [each.get("interruptId") for each in answers if isinstance(each, Mapping)]
    return len(ids) == len(resume) and question_id in ids


def question(verdict: Verdict, invocation: Invocation) -> InterruptException:
    """Create the interrupt that describes the limit that was reached, and the agent.

    Strands keeps the interrupts of all nodes of a graph by ID, so each question needs a unique one.
    """
    breach = cast("Breach", verdict.breach)
    return InterruptException(
        Interrupt(
            id=f"{NAME}:{invocation.agent}:{invocation.id}",
            name=NAME,
            # A session manager stores interrupts as JSON, which has no type for a Decimal.
            reason={
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
                "question": f"Agent {invocation.agent!r} reached {usage_of(breach)}"
                f"{place_of(breach)} Answer {{'extend': {{{breach.limit!r}: N}}}} to allow N "
                f"more, or anything else to stop. Invocation ID: {invocation.id}.",
            },
        )
    )


def answer_of(agent: Agent) -> Interrupt | None:
    """Return our question with the human's answer, if this leg resumes it.

    An answer of `None` does not raise the limit.
    """
    state = interrupt_state(agent)
    # While tools wait, an interrupt with our name belongs to an agent that is one of the tools.
    if state is None or state.pending_tool_execution is not None:
        return None
    ours = [each for each in state.interrupts.values() if each.name == NAME]
    return ours[-1] if ours else None


def consume_answer(agent: Agent, answer: Interrupt | None) -> None:
    """Remove an answer once it is used.

    Strands would keep it until the agent ends, and a later resume, which answers a tool's question,
    would find it again.
    """
    state = interrupt_state(agent)
    if answer is not None and state is not None:
        state.interrupts.pop(answer.id, None)


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


def declined_verdict(answer: Interrupt | None) -> Verdict | None:
    """Restore the verdict of a question that was answered without an extension."""
    if answer is None or extension_of(answer.response) is not None:
        return None
    breach = _asked_about(answer)
    problem = _problem_of(answer.response, breach.limit)
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


def _asked_about(question: Interrupt) -> Breach:
    """Restore the breach of a question, which was stored with the application's sessions."""
    with contextlib.suppress(TypeError, AttributeError, ArithmeticError):
        breach = breach_from_json(question.reason)
        if all(isinstance(each, NUMBERS) for each in (breach.cap, breach.observed)):
            return breach
    # Even if it was damaged there, a question without approval ends the invocation.
    return Breach("max_turns", 0, 0, "max_turns", "turns")
