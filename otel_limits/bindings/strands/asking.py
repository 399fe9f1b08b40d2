"""Asks a human for more budget, by an interrupt, and reads the answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, cast

from strands.interrupt import Interrupt, InterruptException

from otel_limits.bindings.strands.private import interrupt_state
from otel_limits.bindings.strands.spans import as_json
from otel_limits.core.limits import LIMIT_NAMES, Breach, Limits
from otel_limits.core.messages import why
from otel_limits.core.policy import Policy, Verdict

if TYPE_CHECKING:
    from strands.agent.agent import Agent
    from strands.hooks import AfterInvocationEvent


ASK_ID: Final = "v1:otel_limits:ask"
"""Id of the interrupt that asks a human for more."""


def can_be_extended(verdict: Verdict) -> bool:
    """Tell whether more of the limit can be given to one invocation."""
    return verdict.breach is not None and verdict.breach.limit in LIMIT_NAMES


def is_unanswered(event: AfterInvocationEvent) -> bool:
    """Tell whether a hook resumes a leg that ended with our question, and does not answer it.

    Strands refuses that with an exception, which such a hook never met without us.
    """
    asked = event.result is not None and any(
        each.id == ASK_ID for each in event.result.interrupts or ()
    )
    return asked and not _answers(event.resume)


def _answers(resume: object) -> bool:
    """Tell whether a hook resumes with answers alone, and ours is among them."""
    if not isinstance(resume, list) or not all(isinstance(each, Mapping) for each in resume):
        return False
    answers = [each.get("interruptResponse") for each in resume]
    ids = [each.get("interruptId") for each in answers if isinstance(each, Mapping)]
    return len(ids) == len(resume) and ASK_ID in ids


def question(verdict: Verdict) -> InterruptException:
    """Make the interrupt that tells a human what was reached."""
    breach = cast("Breach", verdict.breach)
    return InterruptException(
        Interrupt(
            id=ASK_ID,
            name="otel_limits",
            reason={
                "limit": breach.limit,
                "cap": as_json(breach.cap),
                "observed": as_json(breach.observed),
                "reason": breach.reason,
                "unit": breach.unit,
                "question": f"{why(verdict)}. Answer {{'extend': {{{breach.limit!r}: …}}}} "
                "to go on, anything else to stop.",
            },
        )
    )


def answer_of(agent: Agent) -> Interrupt | None:
    """Return our question with the human's answer, when this invocation follows it.

    Only a resume follows it: with `None` for an answer, nobody gave more.
    """
    state = interrupt_state(agent)
    return None if state is None else state.interrupts.get(ASK_ID)


def extension_of(response: object) -> Limits | None:
    """Read `{"extend": {"max_turns": 20}}`; `None` for anything else, and where no cap is named."""
    if not isinstance(response, Mapping) or not isinstance(response.get("extend"), Mapping):
        return None
    try:
        caps = {name: cap for name, cap in response["extend"].items() if cap not in (None, {})}
        return Limits(**caps) if caps else None
    except (TypeError, ValueError):
        return None


def extend(policy: Policy, response: object) -> Policy:
    """Let the invocation use what the human gave it more."""
    extension = extension_of(response)
    if extension is None:
        return policy
    return dataclasses.replace(policy, limits=extension.over(policy.limits))


def declined_verdict(answer: Interrupt | None) -> Verdict | None:
    """Rebuild the verdict that a human was asked about and did not lift."""
    if answer is None or extension_of(answer.response) is not None:
        return None
    reason = answer.reason if isinstance(answer.reason, Mapping) else {}
    return Verdict(
        reason.get("reason", "max_turns"),
        (
            Breach(
                reason.get("limit", "max_turns"),
                reason.get("cap", 0),
                reason.get("observed", 0),
                reason.get("reason", "max_turns"),
                reason.get("unit", ""),
            ),
        ),
    )
