"""The frameworks that programs are built with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.compositions.of_langchain import LANGCHAIN
from tests.compositions.of_openai_agents import OPENAI_AGENTS
from tests.compositions.of_strands import STRANDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.compositions.run import Framework

FRAMEWORKS: Final[Mapping[str, Framework]] = {
    "strands": STRANDS,
    "langchain": LANGCHAIN,
    "openai-agents": OPENAI_AGENTS,
}
