"""Requests more budget from a human, and reads the answer: the words of all frameworks."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, cast

from otel_limits.bindings.span_writer import json_value
from otel_limits.core.events import breach_from_json
from otel_limits.core.halt_texts import allowed_by_yes, origin_of, question_for_end_user, usage_of
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.labels import clean, quoted
from otel_limits.core.limits import CONVERSATION_PREFIX, EXTENDABLE, Breach, Limits, kind_of
from otel_limits.core.policy import Overrides, Verdict
from otel_limits.core.values import MappingKind
from otel_limits.core.wording import closest_match

if TYPE_CHECKING:
    from otel_limits.core.events import Invocation
    from otel_limits.core.usage import Number

logger = logging.getLogger("otel_limits")

EXTEND: Final = "extend"
"""Key of the answer that raises limits."""

AGAIN: Final = "again"
"""Key of a question that is asked for the second time, as the first answer was not understood."""

NUMBERS: Final = (int, float, Decimal)


def question(verdict: Verdict, invocation: Invocation) -> dict[str, Any]:
    """Describe the limit that was reached, and the agent.

    `question` is for the end user, `sentence` for the operator. Frameworks store it as JSON, which
    has no type for a Decimal.
    """
    breach = cast("Breach", verdict.breach)
    understood = f"{verdict.remark} " if verdict.remark else ""
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
        "resumes": breach.resumes,
        "agent": invocation.agent,
        "invocation_id": invocation.id,
        AGAIN: verdict.asks_again,
        "question": question_for_end_user(verdict),
        "sentence": f"{_reached(breach, invocation)} {understood}Answer yes to allow "
        f"{allowed_by_yes(breach)}, a number to allow that many, "
        f"{{'extend': {{{breach.limit!r}: N}}}} for this and other "
        f"limits, or no to stop. Invocation ID: {invocation.id}.",
    }


@suppress_errors("binding")
def log_question(verdict: Verdict, invocation: Invocation) -> None:
    """Log that an agent waits for an answer: the application may not show the question."""
    if verdict.breach is not None:
        reached = _reached(verdict.breach, invocation)
        logger.warning("%s It waits for an answer. Invocation ID: %s.", reached, invocation.id)


def _reached(breach: Breach, invocation: Invocation) -> str:
    return f"Agent {quoted(invocation.agent)} reached {usage_of(breach)}{origin_of(breach)}"


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


YES: Final = frozenset({"yes", "y", "true", "continue", "approve"})
NO: Final = frozenset({"no", "n", "false", "stop"})

NUMBER: Final = re.compile(r"\d{1,12}(?:\.\d{1,9})?")


NUMBER_LIKE: Final = re.compile(r"[-+]?[\d.,_' ]*\d[\d.,_' ]*(?:e[-+]?\d+)?")
"""A number that a person may type, but that cannot be used."""


def extension_of(asked: object, response: object) -> Overrides | None:
    """Return by how much an answer raises limits; `None` if it does not.

    Args:
        asked: The question.
        response: True, a text of `YES`, a number, or `{"extend": {"max_turns": 20}}`.
    """
    more = response
    if isinstance(response, Mapping):
        more = response.get(EXTEND)
        if isinstance(more, Mapping):
            caps = {name: cap for name, cap in more.items() if cap not in (None, {})}
            return None if _is_about_others(caps, _breach_of(asked)) else _limits_of(caps)
    breach = _breach_of(asked)
    amount = _amount_of(more, breach)
    if amount is None or breach.limit not in EXTENDABLE:
        return None
    return _limits_of({breach.limit: {breach.subject: amount} if _is_per_tool(breach) else amount})


def _is_about_others(caps: Mapping[Any, Any], breach: Breach) -> bool:
    """Return whether an answer raises limits, but not the one that was reached."""
    if not caps or breach.limit not in EXTENDABLE:
        return False
    cap = caps.get(breach.limit)
    return cap is None or (isinstance(cap, Mapping) and breach.subject not in cap)


def _amount_of(more: object, breach: Breach) -> Number | None:
    if isinstance(more, str):
        word = more.strip().casefold()
        if word in YES:
            return breach.cap
        if NUMBER.fullmatch(word) is None:
            return None
        return Decimal(word) if "." in word else int(word)
    if more is True:
        return breach.cap
    # Zero would turn a loop limit off.
    return more if isinstance(more, NUMBERS) and more > 0 else None


def _limits_of(caps: Mapping[str, Any]) -> Overrides | None:
    try:
        return _overrides(caps) if caps else None
    # An answer can be any text that a person typed; invalid limits extend nothing.
    except (TypeError, ValueError):
        return None


def _overrides(caps: Mapping[str, Any]) -> Overrides:
    own = {name: cap for name, cap in caps.items() if not str(name).startswith(CONVERSATION_PREFIX)}
    shared = {
        name.removeprefix(CONVERSATION_PREFIX): cap for name, cap in caps.items() if name not in own
    }
    return Overrides(limits=Limits(**own), conversation=Limits(**shared))


def _is_per_tool(breach: Breach) -> bool:
    kind = kind_of(breach.limit)
    return kind is not None and isinstance(kind.kind, MappingKind)


def declined_verdict(asked: object, response: object) -> Verdict | None:
    """Return what follows an answer that extends no limit; `None` if it extends one.

    That is the halt; or the question once again, with what is understood, if the answer is not.

    Args:
        asked: The question.
        response: The answer.
    """
    if extension_of(asked, response) is not None:
        return None
    breach = _breach_of(asked)
    problem = _problem_of(response, breach)
    if not problem:
        return Verdict(breach.reason, (breach,))
    is_second = isinstance(asked, Mapping) and bool(asked.get(AGAIN))
    remark = f"The answer was not understood: {problem}"
    return Verdict(breach.reason, (breach,), remark=remark, asks_again=not is_second)


def _problem_of(response: object, breach: Breach) -> str:
    """Return why an answer is neither an extension nor a refusal; empty if it is a refusal.

    Args:
        response: The answer.
        breach: The limit that was reached.
    """
    if isinstance(response, Mapping):
        return _problem_in(response, breach)
    word = response.strip().casefold() if isinstance(response, str) else ""
    if response is None or response is False or word in NO:
        return ""
    if word.startswith("{"):
        return "it is text, not a mapping."
    shown = quoted(clean(str(response)))
    if isinstance(response, NUMBERS) or NUMBER_LIKE.fullmatch(word):
        return f"{shown} is not {_amounts(breach)}."
    return f"{shown} is neither yes, no nor {_amounts(breach)}."


def _amounts(breach: Breach) -> str:
    """Describe the numbers by which a limit can be raised."""
    kind = kind_of(breach.limit)
    each = None if kind is None else kind.kind
    each = each.each if isinstance(each, MappingKind) else each
    is_whole = each is None or each.schema["type"] == "integer"
    return "a whole number of 1 or more" if is_whole else "a number above 0"


def _problem_in(response: Mapping[Any, Any], breach: Breach) -> str:
    if not response:
        return ""
    if EXTEND in response:
        return _problem_with(response[EXTEND] or {}, breach)
    for field in response:
        if closest_match(str(field), [EXTEND]):
            return _unknown(field, EXTEND)
        if closest_match(str(field), EXTENDABLE):
            return f"{clean(str(field))!r} must be within {EXTEND!r}."
    return f"it has no {EXTEND!r}."


def _problem_with(more: object, breach: Breach) -> str:
    """Return why an extension is invalid; empty if it is valid, or has no cap."""
    if not isinstance(more, Mapping):
        return f"{EXTEND!r} must be {_amounts(breach)}, or map limits to caps."
    unknown = next((each for each in more if each not in EXTENDABLE), None)
    if unknown is not None:
        return _unknown(unknown, closest_match(str(unknown), EXTENDABLE) or breach.limit)
    try:
        _overrides(more)
    except ValueError as error:
        return str(error)
    if _is_about_others({name: cap for name, cap in more.items() if cap not in (None, {})}, breach):
        of = f" of {quoted(breach.subject)}" if breach.subject else ""
        return f"it raises {', '.join(more)}, but not {breach.limit}{of}, which was reached."
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
