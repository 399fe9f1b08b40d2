"""Words the result of a tool that called a halted agent for the model around that agent."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from otel_limits.core.texts import for_end_user, for_model
from otel_limits.runs.registry import is_within

if TYPE_CHECKING:
    from otel_limits.core.policy import Verdict
    from otel_limits.runs.registry import TaskScope
    from otel_limits.runs.run import Run

EDGE: Final = r"""["']|\\n"""
"""Around a whole text within JSON: quotes, or the line breaks of its other lines."""


def is_text_of_halt(text: str, child: Run, verdict: Verdict) -> bool:
    """Return whether a text is that of the halt of an agent, so that no model wrote it."""
    return text.strip() == _text_of_halt(child, verdict)


def _text_of_halt(child: Run, verdict: Verdict) -> str:
    return for_end_user(child.invocation.agent, verdict, child.policy.halt_message)


def raised_text(run: Run, scope: TaskScope | None) -> str | None:
    """Return the text for the model if a tool has failed by the halt of an agent it has called."""
    texts = [
        for_model(child.invocation.agent, verdict)
        for child, verdict in run.halted.values()
        if child.raised and is_within(child, scope)
    ]
    return texts[-1] if texts else None


def reworded_text(text: str, run: Run, scope: TaskScope | None = None) -> str:
    """Replace the texts of halted agents by those for the model around them.

    The sentence for the end user is replaced where it is a whole line, with the name of a node
    before it in the result of a group. In the result of the tool that ran the halted agent, it is
    also replaced where it is a whole text within JSON or in quotes.

    Args:
        text: The result of a tool.
        run: The invocation that called the tool.
        scope: The call, if known.
    """
    # Several agents may have the same last message: those of this tool first, then the latest.
    halts = list(run.halted.items())[::-1]
    halts.sort(key=lambda each: not is_within(each[1][0], scope))
    for sentence, (child, verdict) in halts:
        text = text.replace(sentence, for_model(child.invocation.agent, verdict))
    for is_named in (True, False):
        for _, (child, verdict) in halts:
            agent = child.invocation.agent
            read = _text_of_halt(child, verdict)
            front = rf".*\b{re.escape(agent)}: " if is_named else "(?:.*: )?"
            line = rf"^({front}){re.escape(read)}$"
            text = _replaced(line, text, read, for_model(agent, verdict))
    for _, (child, verdict) in halts:
        if scope is not None and is_within(child, scope):
            told, read = for_model(child.invocation.agent, verdict), _text_of_halt(child, verdict)
            for written in (str, _in_json, _in_ascii_json):
                text_within = rf"({EDGE}){re.escape(written(read))}(?={EDGE})"
                text = _replaced(text_within, text, written(read), written(told))
    return text


def _replaced(pattern: str, text: str, read: str, told: str) -> str:
    if not read or read not in text:
        return text
    return re.sub(pattern, lambda found: found[1] + told, text, flags=re.MULTILINE)


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _in_ascii_json(text: str) -> str:
    return json.dumps(text)[1:-1]
