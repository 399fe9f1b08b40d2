"""The unit tests that each framework ships in its source distributions, and what they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The unit tests in one source distribution. All run offline."""

    distribution: str
    tests: Sequence[str]
    """Their files and folders."""
    extras: str = ""
    """Extras of the distribution that they need, in brackets."""
    has_agents: bool = True
    is_editable: bool = False
    """The tests need the package to be that of the sources."""

    def installed(self, sources: Path) -> Sequence[str]:
        """Return the arguments of pip that install it from an index, or from its sources."""
        if self.is_editable:
            return "-e", f"{sources}{self.extras}"
        return (f"{self.distribution}{self.extras}=={version(self.distribution)}",)


@dataclass(frozen=True, kw_only=True)
class Framework:
    """The suites of a framework, which run in one environment."""

    suites: Sequence[Suite]
    needed: Sequence[str]
    """Requirements of the tests, in addition to the distributions."""
    variables: Mapping[str, str] = field(default_factory=dict)


FRAMEWORKS: Final[Mapping[str, Framework]] = {
    "strands": Framework(
        suites=(
            Suite(
                distribution="strands-agents",
                # The parts that run an agent, or that otel-limits attaches to.
                tests=tuple(
                    f"tests/strands/{name}"
                    for name in (
                        *("agent", "event_loop", "telemetry", "hooks", "middleware", "plugins"),
                        *("interventions", "types", "multiagent", "session"),
                    )
                ),
                extras="[a2a,otel]",
            ),
        ),
        needed=("pytest>=9", "pytest-asyncio>=1", "pytest-timeout>=2", "moto>=5.1"),
    ),
    "langchain": Framework(
        suites=(
            Suite(distribution="langchain", tests=("tests/unit_tests",)),
            # These call models and tools alone.
            Suite(distribution="langchain-core", tests=("tests/unit_tests",), has_agents=False),
            Suite(distribution="langgraph", tests=("tests",)),
            Suite(distribution="langgraph-prebuilt", tests=("tests",)),
        ),
        needed=(
            *("pytest>=9", "pytest-asyncio>=1.3", "pytest-timeout>=2", "pytest-mock"),
            *("pytest-socket", "pytest-benchmark", "syrupy>=5", "blockbuster", "freezegun"),
            *("responses", "toml", "numpy", "fastmcp>=4", "langchain-tests", "langchain-openai"),
            *("langchain-text-splitters", "redis", "pycryptodome", "langgraph-checkpoint-sqlite"),
            *("langgraph-checkpoint-postgres", "psycopg[binary,pool]"),
        ),
        variables={"NO_DOCKER": "true"},  # LangGraph's tests would start PostgreSQL and Redis
    ),
    "openai-agents": Framework(
        suites=(
            Suite(
                distribution="openai-agents",
                tests=("tests",),
                extras="[docker,encrypt,litellm,redis,sqlalchemy,viz,voice]",
                is_editable=True,
            ),
        ),
        needed=(
            *("pytest>=9", "pytest-asyncio>=1.3", "pytest-timeout>=2", "pytest-mock"),
            *("inline-snapshot", "fakeredis", "aiosqlite", "sqlalchemy[asyncio]", "fastapi"),
            "textual",
        ),
    ),
}
"""By the name of the extra that installs the framework."""
