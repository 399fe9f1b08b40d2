"""The documentation pages, in Markdown, that `otel-limits docs` shows.

In: the name of a page.
Out: its text.
May touch: its files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Final

PAGES: Final[Mapping[str, Mapping[str, str]]] = {
    "start": {
        "recipe": "Choose limits step by step: observe, suggest, backtest, halt",
        "limits": "Limits, actions and stop reasons",
        "tasks": "Limits over interrupts and conversations",
        "loops": "Failing tools, repeated calls, hand-offs in circles",
        "launchers": "How each launcher is covered",
    },
    "reference": {
        "settings": "Environment variables, options, and the policy file",
        "trees": "One budget for an agent and its sub-agents",
        "quotas": "Limits per time window, shared by a fleet",
        "quota-store": "Redis or Valkey: permissions, outages, restarts, sizing",
        "prices": "Model call costs, and calls without a known price",
        "metrics": "Prometheus and OTLP metrics, custom observers",
        "ledger": "Record of every model call, and its durability",
        "imports": "Spans and logs of other programs, as model calls",
        "audit": "Spend, stop reasons, backtests and suggestions from the ledger",
        "books": "Whether a ledger is consistent and unchanged",
        "bill": "Charges of vendors, compared with the ledger",
        "top": "Live activity, spend and limits in the terminal",
        "strands": "Strands agents, also realtime",
        "langchain": "LangChain and LangGraph agents",
        "openai-agents": "Agents of the OpenAI Agents SDK",
        "frameworks": "Features of each framework",
        "api": "Public API",
    },
    "operations": {
        "production": "Stores, ledgers and scraping for a fleet",
        "failures": "Behavior during errors and outages",
        "overhead": "Overhead in CPU and wall time",
        "container": "Container images",
        "kubernetes": "Kubernetes",
        "lambda": "AWS Lambda",
        "agentcore": "Amazon Bedrock AgentCore",
        "fastapi": "FastAPI with several workers",
        "celery": "Celery",
        "batch": "Batch jobs",
        "jupyter": "Jupyter notebooks",
    },
    "internals": {
        "how-it-works": "From an agent's spans to a halt",
        "own-framework": "Bindings to other agent frameworks",
        "vendors": "Billed and counted tokens, vendor by vendor",
    },
}
"""Each group's pages, with a line about each."""

GENERATED: Final = re.compile(r"<!--.*?-->\n?", re.DOTALL)
"""A marker around generated text."""


def topics() -> tuple[str, ...]:
    """Return the names of all pages."""
    return tuple(topic for group in PAGES.values() for topic in group)


def page(topic: str) -> str:
    """Return the text of a page.

    Raises:
        KeyError: There is no page of this name.
    """
    # A topic is user input; `../x` must not be opened.
    if topic not in topics():
        raise KeyError(topic)
    return GENERATED.sub("", files(__name__).joinpath(f"{topic}.md").read_text(encoding="utf-8"))
