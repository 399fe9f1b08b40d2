"""The message of a halt: its wording, and its stop as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.events import Stop
from otel_limits.core.halts import halt_sentence, reached
from otel_limits.core.limits import Breach, Level
from otel_limits.core.quota_state import QuotaRefusal
from otel_limits.core.usage import Usage

if TYPE_CHECKING:
    from otel_limits.core.policy import Verdict

MARKER: Final = "otel_limits"
"""Key of the stop under a message's `metadata["custom"]`, which is never sent to a model."""


QUOTA_NUMBERS: Final = ("used", "reserved", "limit")


def halt_text(verdict: Verdict, agent: str) -> str:
    """Return the text of the message that ends a halted conversation."""
    # Always "halted": `is_ours` recognizes the message by this text, before the action was taken.
    sentence = halt_sentence(agent, verdict.reason, "halted", verdict.breach)
    return f"{sentence} otel-limits wrote this message, and no model."


def partial_note(verdict: Verdict, agent: str) -> str:
    """Return the note below a final answer that marks it as incomplete."""
    sentence = halt_sentence(agent, verdict.reason, "wrapped_up", verdict.breach)
    return f"\nThis answer is partial. {sentence}"


def reason_text(verdict: Verdict) -> str:
    """Return which limit was reached, as half a sentence."""
    breach = verdict.breach
    if breach is None:
        return "the invocation was killed"
    return reached(breach)


def wrap_up_note(verdict: Verdict) -> str:
    """Return the note to the model that its next answer is the last."""
    return (
        f"The budget of this task is spent: {reason_text(verdict)}. You can no longer use tools. "
        "Give your final answer now, from what you know already, and say what is missing."
    )


def refusal_note(breach: Breach) -> str:
    """Return the note to the model why a tool call did not run."""
    which = f"tool {breach.subject!r}" if breach.subject else "tools"
    return (
        f"Not run: the limit of {breach.cap} calls of {which} is reached. "
        "Don't ask for it again; answer with what you have."
    )


NUDGE_NOTE: Final = (
    "Note: you are repeating yourself: this call and its result are the same as before. "
    "Try something different, or give your answer now. One more repetition ends this task."
)


def budget_note(levels: Sequence[Level]) -> str:
    """Return the note to the model with what is left of each limit."""
    left = ", ".join(
        f"{max(level.cap - level.observed, 0)} of {level.cap} ({level.limit})"  # type: ignore[operator]
        for level in levels
    )
    return f"Budget left for this task: {left}. Use it sparingly and finish in time."


def halt_message(verdict: Verdict, agent: str) -> dict[str, Any]:
    """Return the assistant message that ends a halted conversation."""
    return {"role": "assistant", "content": [{"text": halt_text(verdict, agent)}]}


def stop_to_json(stop: Stop) -> dict[str, Any]:
    """Return a stop as plain JSON values, with the deciding limit at the top."""
    values: dict[str, Any] = dataclasses.asdict(stop, dict_factory=_exact)
    breach = values.pop("breach") or {}
    # Both repeat other fields, and every message of a halt is stored with a session.
    for name in ("levels", "invocation"):
        del values[name]
    # The deciding limit is repeated at the top, so that log queries need not look into a list.
    return {
        **values,
        "limit": breach.get("limit"),
        "cap": breach.get("cap"),
        "observed": breach.get("observed"),
        "breaches": [dict(each) for each in values["breaches"]],
    }


def _exact(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Convert exact amounts to text, so that they stay exact in JSON."""
    return {name: str(each) if isinstance(each, Decimal) else each for name, each in items}


def stop_from_json(marker: Mapping[str, Any]) -> Stop:
    """Parse the result of `stop_to_json`."""
    # A newer otel-limits may have written the message, with fields unknown to this version.
    known = {spec.name for spec in dataclasses.fields(Stop)}
    values = {name: value for name, value in marker.items() if name in known}
    breaches = tuple(_breach(each) for each in marker.get("breaches", ()))
    values["breaches"] = breaches
    # The breach is always the first of the list, so that they cannot differ.
    values["breach"] = breaches[0] if breaches else None
    values["usage"] = Usage(**marker.get("usage", {}))
    values["cost"] = Decimal(marker.get("cost", 0))
    return Stop(**values)


def _breach(values: Mapping[str, Any]) -> Breach:
    """Parse a breach."""
    quota = values.get("quota")
    refusal = None if quota is None else QuotaRefusal(**_with_money(quota, *QUOTA_NUMBERS))
    known = {spec.name for spec in dataclasses.fields(Breach)}  # as above
    read = _with_money(values, "cap", "observed", "reserved")
    named = {name: value for name, value in read.items() if name in known}
    return Breach(**{**named, "quota": refusal})


def _with_money(values: Mapping[str, Any], *numbers: str) -> dict[str, Any]:
    """Parse numbers; only amounts of money were written as text."""
    return {
        name: Decimal(each) if name in numbers and isinstance(each, str) else each
        for name, each in values.items()
    }
