"""Each halt text: the halt message for the operator, the end user, and models.

There is one function for each reader:

- The operator reads the log, the span, the ledger, the exception and `stop_of(result)`. The text
  names the limit, its usage, where it is set, and what to do next.
- The end user reads the agent's last message, and so does the next node of a graph or a swarm.
- The model around a halted agent reads the result of the tool that called it.

The halted agent's own model reads notes, which are not stored in its conversation.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.labels import MAX_LENGTH, clean, quoted
from otel_limits.core.limits import (
    CONVERSATION_PREFIX,
    EXTENSION,
    KILLED_STOP_REASON,
    LOOP_DETECTED_STOP_REASON,
    MAX_COST_STOP_REASON,
    MAX_DURATION_STOP_REASON,
    MAX_INPUT_TOKENS_STOP_REASON,
    MAX_ITERATIONS_STOP_REASON,
    MAX_MODEL_CALLS_STOP_REASON,
    MAX_OUTPUT_TOKENS_STOP_REASON,
    MAX_TOKEN_BUDGET_STOP_REASON,
    MAX_TOOL_CALLS_STOP_REASON,
    MAX_TURNS_STOP_REASON,
    QUOTA_EXCEEDED_STOP_REASON,
    QUOTA_UNAVAILABLE_STOP_REASON,
    REPEATED_FAILURES,
    TREE_PREFIX,
    USD,
    kind_of,
    over_resumes,
    setting_of,
)
from otel_limits.core.secrets import redact_message
from otel_limits.core.wording import shortest

if TYPE_CHECKING:
    from otel_limits.core.limits import Breach, Level
    from otel_limits.core.policy import Verdict
    from otel_limits.core.usage import Number

MOST_OF_ERROR: Final = 200
"""Longest part of an error's text."""

GATEWAY_BUDGET: Final = "gateway_budget"
"""Replaces the name of a limit if a gateway or a vendor has refused a call."""

QUOTA_REASONS: Final = (QUOTA_EXCEEDED_STOP_REASON, QUOTA_UNAVAILABLE_STOP_REASON)


# --- the operator ---------------------------------------------------------------------------------

DONE: Final[Mapping[str, str]] = {
    "halted": "was halted",
    "raised": "was halted",
    "wrapped_up": "was halted",
    "observed": "would have been halted",
    "none": "was refused a model call",
}
"""The outcome for the agent, by the action that was taken."""

KILLED_NEXT: Final = "Run the agent again when it is safe to continue."
OBSERVED_NEXT: Final = "Continuing because the action is observe."

NEXT: Final[Mapping[str, str]] = {
    QUOTA_EXCEEDED_STOP_REASON: "Run the agent again later, or raise or unblock the quota: "
    "with `otel-limits quotas` in a shared store, otherwise in the policy file.",
    QUOTA_UNAVAILABLE_STOP_REASON: "Restore the quota store; on_store_error in the policy file "
    "sets the behavior during an outage.",
}
"""The next step after a halt, by stop reason, if it is not to raise the limit."""

UNREAD_CONVERSATION_NEXT: Final = (
    "Restore the quota store; conversation_on_store_error sets the behavior during an outage."
)
PRICE_NEXT: Final = "Add a price under models in the policy file."
UNMEASURED_NEXT: Final = "Set OTEL_LIMITS_UNMEASURED=estimate to count such calls by estimate."
BOUND_NEXT: Final = (
    "Calls with an unknown price count at its upper bound: add a price under models in the policy "
    "file to count them exactly."
)

EXEMPT: Final = "OTEL_LIMITS_EXEMPT_TOOLS exempts a tool for which this is normal."

LOOP_NEXT: Final[Mapping[str, str]] = {
    "max_consecutive_same_tool": "No other tool was called in between. Check whether the task "
    f"needs this many calls before raising the limit; {EXEMPT}",
    "max_identical_tool_calls": "Arguments and results were the same each time. Check why the "
    f"agent repeats the call before raising the limit; {EXEMPT}",
    "max_repeated_tool_cycles": "The same few calls returned the same results each time. Check why "
    f"the agent repeats them before raising the limit; {EXEMPT}",
    "max_no_progress_turns": "These turns had no new tool result and no new text. Check what the "
    "agent is missing before raising the limit.",
    "max_consecutive_tool_failures": "Every tool call of these turns failed. Check the tools and "
    f"what the agent needs for them before raising the limit; {EXEMPT}",
    "max_consecutive_failures_per_tool": "Check the tool and what the agent needs for it before "
    f"raising the limit; {EXEMPT}",
    "max_consecutive_handoffs": "Agents handed over to each other, and no other tool was used in "
    "between. Check what each of them is waiting for before raising the limit.",
    REPEATED_FAILURES: "The last invocations had the same input and failed in the same way. Remove "
    "the cause, or change the input, before raising the limit.",
}
"""The observation, and the next step, by loop limit."""


def for_operator(agent: str, verdict: Verdict, action: str) -> str:
    """Return the halted agent, the limit, its usage, where it is set, and the next step.

    Args:
        agent: Name of the agent; empty if unknown.
        verdict: Why it was halted.
        action: The action taken, such as `halted`.
    """
    who = f"Agent {quoted(agent)}" if agent else "The agent"
    done, breach = DONE.get(action, DONE["halted"]), verdict.breach
    if breach is None:
        is_killed = verdict.reason == KILLED_STOP_REASON
        return (
            f"{who} was killed. {KILLED_NEXT}"
            if is_killed
            else f"{who} {done} by {verdict.reason}."
        )
    then = OBSERVED_NEXT if action == "observed" else _next_step(breach)
    remark = verdict.remark or (WRAPPED_UP_REMARK if action == "wrapped_up" else "")
    about = [f"{who} {done} by {usage_of(breach)}{origin_of(breach)}", remark, then]
    return " ".join(filter(None, about))


# The invocation may still fail: it was wrapped up once the model has answered.
WRAPPED_UP_REMARK: Final = "The model then wrote a final answer."
CANCELLED_REMARK: Final = "Its final answer was cancelled."
EMPTY_REMARK: Final = "Its final answer was empty."
TOOLS_REMARK: Final = "Instead of a final answer, the model requested tools."


def no_last_answer(reason: str) -> str:
    """Return the remark that the model was not asked for a final answer."""
    return f"No final answer was requested: {reason}."


NOTHING_TO_SUM_UP: Final = no_last_answer("there is nothing to sum up")


def failed_remark(error: Exception) -> str:
    """Return the remark about a final answer that failed."""
    text = clean(redact_message(str(error)), MOST_OF_ERROR)
    return f"Its final answer failed ({type(error).__name__}{f': {text}' if text else ''})."


def usage_of(breach: Breach) -> str:
    """Return the limit with its tool, usage and cap."""
    # The note of a quota contains its name, its key and its window.
    limit = breach.reason if breach.reason in QUOTA_REASONS else breach.limit
    tool = f" for tool {quoted(breach.subject)}" if breach.subject else ""
    error = f", last error: {breach.error!r}" if breach.error else ""
    return f"{limit}{tool}: {breach.note or breach.amount}{error}"


def refused_turns_note(breach: Breach, turns: int) -> str:
    """Return the usage of a tool's cap, if its refusals have halted the agent.

    Args:
        breach: The cap.
        turns: Number of turns in a row whose tool calls were all refused.
    """
    used = f"{breach.cap} of {breach.cap} {breach.unit} used{over_resumes(breach, 'by')}"
    return f"{used}, and {turns} turns in a row had only refused calls"


def origin_of(breach: Breach) -> str:
    """End a sentence, and add where its limit is set, if known."""
    if breach.origin.startswith(EXTENSION):
        return f". The limit was extended by {breach.origin}."
    return f". The limit is set in {breach.origin}." if breach.origin else "."


def _next_step(breach: Breach) -> str:
    """Return what the operator can do about a halt."""
    # No limit of otel-limits was reached, so none can be raised here.
    if breach.limit == GATEWAY_BUDGET:
        return "Raise the budget there."
    if breach.uncounted:
        return PRICE_NEXT if breach.unit == USD else UNMEASURED_NEXT
    if (
        breach.limit.startswith(CONVERSATION_PREFIX)
        and breach.reason == QUOTA_UNAVAILABLE_STOP_REASON
    ):
        return UNREAD_CONVERSATION_NEXT
    if breach.reason in NEXT or breach.limit in LOOP_NEXT:
        return _unblock(breach) or NEXT.get(breach.reason) or LOOP_NEXT[breach.limit]
    if breach.at_most:
        return f"{BOUND_NEXT} {_raise(breach)}"
    return _raise(breach)


def _unblock(breach: Breach) -> str:
    """Return how to unblock a key that is blocked without an end; empty for all others."""
    quota = breach.quota
    if quota is None or quota.retry_after_seconds is not None:
        return ""
    named = shlex.join((quota.quota, quota.key))
    return f"Unblock it with `otel-limits quotas unblock {named}`."


# A realtime agent is started, others are called; "run" suits both.
RUN_AGAIN: Final = "Run the agent again to continue"
RUN_ROOT: Final = "run the root agent again"
NEW_TASK: Final = "{} a new message to begin a new task"
"""The same after a resume: another answer to an interrupt would not begin a task."""


def _raise(breach: Breach) -> str:
    there = " there" if setting_of(breach.origin) else ""
    # The tree is exhausted: the agent would be halted immediately if called again within it.
    if breach.limit.startswith(TREE_PREFIX):
        again = f"send {NEW_TASK.format('the root agent')}" if breach.resumes else RUN_ROOT
        return f"The whole tree shares this limit: {again}, or raise it{there}."
    if breach.limit.startswith(CONVERSATION_PREFIX):
        shared = "The whole conversation shares this limit"
        return f"{shared}: start a new conversation, or raise it{there}."
    again = f"Send {NEW_TASK.format('the agent')}" if breach.resumes else RUN_AGAIN
    return f"{again}, or raise the limit{there}."


# --- the end user ---------------------------------------------------------------------------------

WHY: Final[Mapping[str, str]] = {
    MAX_ITERATIONS_STOP_REASON: "it took too many steps",
    MAX_TURNS_STOP_REASON: "it took too many steps",
    MAX_MODEL_CALLS_STOP_REASON: "it took too many steps",
    MAX_TOOL_CALLS_STOP_REASON: "it took too many steps",
    MAX_TOKEN_BUDGET_STOP_REASON: "it became too long",
    MAX_INPUT_TOKENS_STOP_REASON: "it became too long",
    MAX_OUTPUT_TOKENS_STOP_REASON: "it became too long",
    MAX_COST_STOP_REASON: "it reached its budget",
    MAX_DURATION_STOP_REASON: "it took too long",
    LOOP_DETECTED_STOP_REASON: "it was making no progress",
    QUOTA_EXCEEDED_STOP_REASON: "a usage limit was reached",
    QUOTA_UNAVAILABLE_STOP_REASON: "a required service was not available",
    KILLED_STOP_REASON: "it was stopped",
}
"""The cause of a halt in everyday words, by stop reason."""


def for_end_user(agent: str, verdict: Verdict, message: str) -> str:
    """Return a short text without names of variables, files or code.

    It never invites a repetition: its reader may also be a program that would obey.

    Args:
        agent: Name of the agent.
        verdict: Why it was halted.
        message: The policy's `halt_message`.
    """
    limit, used = _limit_and_use(verdict.breach)
    reason = _reason_for_end_user(verdict)
    text = message.format(agent=agent[:MAX_LENGTH], reason=reason, limit=limit, used=used)
    # Whatever the next message asks for: it would be refused.
    return f"{text} {NEW_CONVERSATION}" if _is_of_conversation(verdict) else text


def _reason_for_end_user(verdict: Verdict) -> str:
    breach = verdict.breach
    if breach is None or not breach.uncounted:
        return WHY.get(verdict.reason, "it reached a limit")
    # Nothing may be used yet, and a list of prices does not concern users.
    return "its cost could not be determined" if breach.unit == USD else f"its {_unknown(breach)}"


NEW_CONVERSATION: Final = "Please start a new conversation."


def _is_of_conversation(verdict: Verdict) -> bool:
    """Return whether a halt ends a whole conversation."""
    breach = verdict.breach
    return breach is not None and breach.limit.startswith(CONVERSATION_PREFIX)


def question_for_end_user(verdict: Verdict, how: str = "") -> str:
    """Return the question whether an agent may go on, without names of variables, files or code.

    Args:
        verdict: The limit that was reached.
        how: How to answer, if not by a text.
    """
    _, used = _limit_and_use(verdict.breach)
    amount = f" ({used})" if used else ""
    reason = _reason_for_end_user(verdict)
    if verdict.breach is not None and not how:
        more = allowed_by_yes(verdict.breach)
        how = f"Answer yes to allow {more}, a number to allow that many, or no to stop."
    again = "The answer was not understood. " if verdict.asks_again else ""
    paused = "conversation" if _is_of_conversation(verdict) else "request"
    return f"{again}This {paused} is paused because {reason}{amount}. Continue? {how}"


def allowed_by_yes(breach: Breach) -> str:
    """Return how much more a yes allows: as much as the limit in force, so that each doubles it."""
    return f"{_amount(breach.cap, breach.unit)} more"


def _limit_and_use(breach: Breach | None) -> tuple[str, str]:
    """Return cap and usage with their unit; empty texts if there are none."""
    if breach is None or breach.limit == GATEWAY_BUDGET:
        return "", ""
    if (quota := breach.quota) is not None:
        return _amount(quota.limit, quota.unit), _amount(quota.used, quota.unit)
    limit = _amount(breach.cap, breach.unit)
    kind = kind_of(breach.limit)
    if kind is not None and kind.is_refusal:  # `observed` includes the refused call
        return limit, limit
    if breach.note:  # the usage is unknown
        return limit, ""
    used = _amount(breach.observed, breach.unit)
    return limit, f"at most {used}" if breach.at_most else used


def _amount(number: Number, unit: str) -> str:
    """Return a number with its unit, e.g. `1 turn` or `0.5 USD`."""
    text = f"{number:,}"
    if not isinstance(number, int):  # cents and milliseconds, and parts of a cent
        rounded = f"{number:,.4f}".rstrip("0").rstrip(".")
        text = shortest(number) if rounded == "0" else rounded
    if number == 1:  # "model calls" or "turns without progress"
        unit = re.sub(r"s\b", "", unit, count=1)
    return f"{text} {unit}".rstrip()


# --- the model around the halted agent ------------------------------------------------------------


def for_model(agent: str, verdict: Verdict) -> str:
    """Return the text for the model whose tool is, or calls, the halted agent."""
    who = f"Agent {quoted(agent)}" if agent else "The agent"
    return (
        f"{who} stopped before it finished: {cause_of(verdict)}. Do not call it again for this "
        "task. Answer with what you have, and say what is missing."
    )


CAUSES: Final[Mapping[str, str]] = {
    LOOP_DETECTED_STOP_REASON: "the same steps were repeated without progress",
    QUOTA_EXCEEDED_STOP_REASON: "the quota of model calls is used up",
    QUOTA_UNAVAILABLE_STOP_REASON: "the quota of model calls cannot be checked",
    KILLED_STOP_REASON: "an operator intervened",
}
"""The cause of a halt for a model, by stop reason, if it is not a cap."""


def cause_of(verdict: Verdict) -> str:
    """Return why an agent was halted, as half a sentence for its own model or another one."""
    breach = verdict.breach
    if breach is not None and breach.limit == GATEWAY_BUDGET:
        return "the model vendor's budget is used up"
    if breach is not None and breach.uncounted:
        return f"the {_unknown(breach)}"
    if verdict.reason in CAUSES or breach is None:
        return CAUSES.get(verdict.reason, "a limit was reached")
    return f"{_cap_of(breach)} was reached"


def _unknown(breach: Breach) -> str:
    """Return what keeps a limit from being enforced: a missing price, or missing usage."""
    return "price is unknown" if breach.unit == USD else "usage could not be measured"


def _cap_of(breach: Breach) -> str:
    """Name the limit by its cap, e.g. `the shared limit of 30 turns`."""
    shared = "shared " if breach.limit.startswith(TREE_PREFIX) else ""
    if breach.limit.startswith(CONVERSATION_PREFIX):
        shared = "conversation's "
    unit = breach.unit
    if breach.reason == MAX_TOOL_CALLS_STOP_REASON and breach.subject:
        unit = f"calls to tool {quoted(breach.subject)}"
    return f"the {shared}limit of {_amount(breach.cap, unit)}"


# --- the halted agent's own model -----------------------------------------------------------------


def wrap_up_note(verdict: Verdict) -> str:
    """Return the note that the next answer is the last."""
    ends = "conversation" if _is_of_conversation(verdict) else "task"
    return (
        f"This {ends} must end now: {cause_of(verdict)}. You can no longer use tools. "
        "Give your final answer now, based on what you already know, and say what is missing."
    )


def not_run_note(verdict: Verdict) -> str:
    """Return why a tool that was requested together with the halt did not run."""
    return f"Not run: {cause_of(verdict)}."


def refusal_note(breach: Breach, *, is_final: bool) -> str:
    """Return why a tool call beyond its cap did not run.

    It states a fact of this task and forbids nothing: the conversation may go on with another task.

    Args:
        breach: The cap.
        is_final: The agent is halted, too.
    """
    cap = breach.cap
    if breach.subject:
        fact = f"{breach.subject} was used {cap} of {cap} times in this task."
    else:
        shared = " that its agents share" if breach.limit.startswith(TREE_PREFIX) else ""
        within = "conversation" if breach.limit.startswith(CONVERSATION_PREFIX) else "task"
        fact = f"Not run: {cap} of {cap} tool calls{shared} were used in this {within}."
    return f"{fact} {'Answer' if is_final else 'Use other tools, or answer'} with what you have."


FAILURE_LIMITS: Final = ("max_consecutive_tool_failures", "max_consecutive_failures_per_tool")


def nudge_note(limit: str) -> str:
    """Return the warning that one more turn like the last ones reaches a loop limit."""
    if limit in FAILURE_LIMITS:
        return (
            "Note: the last calls have failed. Try something different, or give your answer now "
            "and say what is missing. One more failure ends this task."
        )
    return (
        "Note: you are repeating yourself: this call and its result are the same as before. "
        "Try something different, or give your answer now. One more repetition ends this task."
    )


def budget_note(levels: Sequence[Level]) -> str:
    """Return what is left of each limit."""
    rests: list[Any] = [level.cap - level.observed for level in levels]  # type: ignore[operator]
    left = ", ".join(
        f"{shortest(max(rest, 0))} of {level.cap} ({level.limit})"
        for level, rest in zip(levels, rests, strict=True)
    )
    return f"Budget left for this task: {left}. Use it sparingly and finish in time."
