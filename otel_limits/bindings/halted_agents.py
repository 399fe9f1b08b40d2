"""Words the result of a tool that called a halted agent for the model around that agent."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from otel_limits.core.texts import for_end_user, for_model
from otel_limits.runs.tree import is_within

if TYPE_CHECKING:
    from otel_limits.runs.run import Run
    from otel_limits.runs.tree import TaskScope


def reworded_text(text: str, run: Run, scope: TaskScope | None = None) -> str:
    """Replace the texts of halted agents by those for the model around them.

    The result of a group has the name of its node before an answer.

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
            read = for_end_user(agent, verdict, child.policy.halt_message)
            if read not in text:
                continue
            front = rf".*\b{re.escape(agent)}: " if is_named else "(?:.*: )?"
            told = for_model(agent, verdict).replace("\\", r"\\")
            # As whole lines: the message can be one that other results contain as well.
            line = rf"^({front}){re.escape(read)}$"
            text = re.sub(line, rf"\g<1>{told}", text, flags=re.MULTILINE)
    return text
