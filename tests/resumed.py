"""Agents whose tools a human allows, in the frameworks in which an answer continues the task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from otel_limits.testing import says, uses
from tests.features.of_langchain import LangChainSubject
from tests.features.of_strands import StrandsSubject

if TYPE_CHECKING:
    from tests.features.subject import Ending, Subject

SUBJECTS: Final = (StrandsSubject(), LangChainSubject())
NAMES: Final = [each.name for each in SUBJECTS]


def run_allowed(subject: Subject, tools: int = 20) -> tuple[Any, list[Ending]]:
    """Call an agent whose every turn requests a tool, and allow each.

    Returns:
        The agent, and the end of each of its invocations.
    """
    script = [uses("search", arguments={"query": str(number)}) for number in range(tools)]
    agent = subject.asking_first(subject.model([*script, says("done")]))
    endings = [subject.call(agent)]
    while endings[-1].question is not None:
        endings.append(subject.accept(agent, endings[-1]))
    return agent, endings
