"""The page on frameworks: `python -m tests.generate frameworks` writes its tables."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from otel_limits.bindings.known import FRAMEWORKS
from tests.features.observed import FEATURES, cell
from tests.features.of_langchain import LangChainSubject
from tests.features.of_openai_agents import OpenAIAgentsSubject
from tests.features.of_strands import StrandsSubject
from tests.paths import ROOT
from tests.readme import table, with_tables

if TYPE_CHECKING:
    from tests.features.subject import Subject

PAGE: Final = ROOT / "otel_limits/docs/frameworks.md"

SUBJECTS: Final[tuple[Subject, ...]] = (
    StrandsSubject(),
    LangChainSubject(),
    OpenAIAgentsSubject(),
)

NO: Final = "no"

BY_NAME: Final = "`LimitsPlugin` is for Strands. Set limits by agent name in the policy file."
NEW_INVOCATION: Final = (
    "each hand-off begins a new invocation of the agent, with zero turns. Set a tree limit as well."
)
AS_TEXT: Final = (
    "the answer is text: types are requested through tools, which the last call does not have."
)
NO_SPANS: Final = "otel-limits emits them instead."

REASONS: Final[Mapping[tuple[str, str], str]] = {
    ("an agent's own limits over hand-offs", "strands"): NEW_INVOCATION,
    ("an agent's own limits over hand-offs", "langchain"): NEW_INVOCATION,
    ("limits in an agent's code", "langchain"): BY_NAME,
    ("limits in an agent's code", "openai-agents"): BY_NAME,
    ("`ask`, with an amount", "openai-agents"): (
        "an approval in the SDK is yes or no, so each approval doubles the limit that was reached."
    ),
    ("`halt` returns from typed agents", "openai-agents"): (
        "the final output must have its type, so the limit's exception is raised."
    ),
    ("`wrap_up` answers with the agent's type", "strands"): AS_TEXT,
    ("`wrap_up` answers with the agent's type", "langchain"): AS_TEXT,
    ("synchronous call is interrupted", "langchain"): (
        "its thread waits for the client of the model. Set the timeout of the client, too."
    ),
    ("`stop_of()` of a stored conversation", "openai-agents"): (
        "every field of an item is sent to the API, so only the result in memory contains the stop."
    ),
    ("`stops_of()` with agents as tools", "strands"): (
        "the result of a tool contains only text, except for `as_tool(delegate=True)`."
    ),
    ("`stops_of()` with agents as tools", "langchain"): (
        "the result of a tool contains only text, unless the tool has `return_direct`."
    ),
    ("`stops_of()` with agents as tools", "openai-agents"): (
        "the result contains their stops only if the answer of such an agent is its final output."
    ),
    ("the framework emits OpenTelemetry spans", "langchain"): NO_SPANS,
    ("the framework emits OpenTelemetry spans", "openai-agents"): NO_SPANS,
}
"""Why a framework lacks a feature, by the title of the row and the name of the framework."""


def tables() -> str:
    """Observe every cell, and format the tables, each with its reasons."""
    parts = []
    for title, rows in FEATURES.items():
        found = {row: [cell(row, subject) for subject in SUBJECTS] for row in rows}
        header = (title, *(subject.title for subject in SUBJECTS))
        reasons = [
            f"- {row}, {subject.title}: {REASONS.get((row, subject.name), '')}\n"
            for row, texts in found.items()
            for subject, text in zip(SUBJECTS, texts, strict=True)
            if text == NO
        ]
        parts.append(table(header, ([row, *texts] for row, texts in found.items())))
        if reasons:
            parts.append("".join(reasons))
    releases = ", ".join(f"{each.distribution} {version(each.distribution)}" for each in FRAMEWORKS)
    parts.append(f"Observed with {releases}, and Python {platform.python_version()}.\n")
    return "\n".join(parts)


def documented() -> dict[tuple[str, str], str]:
    """Return the cells of the page, by the title of the row and the name of the framework."""
    cells: dict[tuple[str, str], str] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| "):
            row, *texts = line.strip("| ").split(" | ")
            for subject, text in zip(SUBJECTS, texts, strict=True):
                cells[row, subject.name] = text
    return cells


def write() -> None:
    """Write the tables into the page."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_tables(page, {"frameworks": tables}), encoding="utf-8")
