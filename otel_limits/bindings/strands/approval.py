"""Asks a human for more budget, by an interrupt, and reads the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, cast

from strands.interrupt import Interrupt, InterruptException

from otel_limits.bindings.strands.private import interrupt_state
from otel_limits.bindings.strands.span_writer import json_value
from otel_limits.core.halts import reached, set_in
from otel_limits.core.limits import LIMIT_NAMES, NO_LIMITS, Breach, Limits
from otel_limits.core.origins import EXTENSION
from otel_limits.core.policy import Policy, Verdict

if TYPE_CHECKING:
    from strands.agent.agent import Agent
    from strands.hooks import AfterInvocationEvent

    from otel_limits.core.events import Invocation

NAME: Final = "otel_limits"
"""Name of the interrupts that ask a human for more; their ids begin with it."""


def can_be_extended(verdict: Verdict) -> bool:
    """Tell whether more of the limit can be given to one invocation."""
    return verdict.breach is not None and verdict.breach.limit in LIMIT_NAMES


def is_unanswered(event: AfterInvocationEvent) -> bool:
    """Tell whether a hook resumes a leg that ended with our question, and does not answer it.

    Strands refuses that with an exception, which such a hook never met without us.
    """
    interrupts = (event.result and event.result.interrupts) or ()
    # Each of them would have to be answered; of the last one we know that nobody but us asks it.
    asked = [each.id for each in interrupts if each.name == NAME]
    return bool(asked) and not _answers(event.resume, asked[-1])


def _answers(resume: object, question_id: str) -> bool:
    """Tell whether a hook resumes with answers alone, and one to a question is among them."""
    if not isinstance(resume, list) or not all(isinstance(each, Mapping) for each in resume):
        return False
    answers = [each.get("interruptResponse") for each in resume]
    ids = [each.get("interruptId") for each in answers if isinstance(each, Mapping)]
    return len(ids) == len(resume) and question_id in ids


def question(verdict: Verdict, invocation: Invocation) -> InterruptException:
    """Make the interrupt that tells a human what was reached, and by whom.

    Strands keeps the interrupts of all nodes of a graph by their ids alone, so that each question
    needs one of its own.
    """
    breach = cast("Breach", verdict.breach)
    return InterruptException(
        Interrupt(
            id=f"{NAME}:{invocation.agent}:{invocation.id}",
            name=NAME,
            # A session manager stores interrupts as JSON, so that nothing else may be in here:
            # money is a Decimal.
            reason={
                "limit": breach.limit,
                "cap": json_value(breach.cap),
                "observed": json_value(breach.observed),
                "reason": breach.reason,
                "unit": breach.unit,
                "note": breach.note,
                "subject": breach.subject,
                "origin": breach.origin,
                "agent": invocation.agent,
                "invocation_id": invocation.id,
                "question": f"Agent {invocation.agent!r} asks for more than {reached(breach)}"
                f"{set_in(breach)} Its invocation is {invocation.id}. Answer "
                f"{{'extend': {{{breach.limit!r}: …}}}} to go on, anything else to stop.",
            },
        )
    )


def answer_of(agent: Agent) -> Interrupt | None:
    """Return our question with the human's answer, when this leg follows it.

    Only a resume follows it: with `None` for an answer, nobody gave more.
    """
    state = interrupt_state(agent)
    # While tools wait, what is called like ours is of an agent that is one of them.
    if state is None or state.pending_tool_execution is not None:
        return None
    ours = [each for each in state.interrupts.values() if each.name == NAME]
    return ours[-1] if ours else None


def consume_answer(agent: Agent, answer: Interrupt | None) -> None:
    """Take an answer away once it was used.

    Strands would keep it until the agent ends by itself, and a later resume, which answers what a
    tool asks, would find it again.
    """
    state = interrupt_state(agent)
    if answer is not None and state is not None:
        state.interrupts.pop(answer.id, None)


def extension_of(response: object) -> Limits | None:
    """Read `{"extend": {"max_turns": 20}}`; `None` for anything else, and where no cap is named."""
    if not isinstance(response, Mapping) or not isinstance(response.get("extend"), Mapping):
        return None
    try:
        caps = {name: cap for name, cap in response["extend"].items() if cap not in (None, {})}
        return Limits(**caps) if caps else None
    # An answer can be anything that a person has typed: what is not a limit extends nothing.
    except (TypeError, ValueError):
        return None


def extend(policy: Policy, response: object) -> Policy:
    """Let the invocation use what the human gave it more."""
    extension = extension_of(response)
    if extension is None:
        return policy
    return policy.merged_over(extension, None, NO_LIMITS, EXTENSION)


def declined_verdict(answer: Interrupt | None) -> Verdict | None:
    """Rebuild the verdict that a human was asked about and did not lift."""
    if answer is None or extension_of(answer.response) is not None:
        return None
    # It comes back from wherever the application stores its sessions. Whatever has become of it
    # there, a question that nobody said yes to ends the invocation.
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
                subject=reason.get("subject"),
                note=reason.get("note", ""),
                origin=reason.get("origin", ""),
            ),
        ),
    )
