"""Whether limits are enforced in this process, how it was enabled, and what prevents it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NoReturn, TypeAlias

from otel_limits.core.events import Enforcing, Event
from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from otel_limits.bindings.framework import Framework, Gap

logger = logging.getLogger("otel_limits")

NOT_ENFORCED: Final = "limits are not enforced: %s"

Source: TypeAlias = Literal[
    "run", "autoload", "instrumentor", "provider", "code", "parent", "plugin"
]
"""How otel-limits was enabled: `otel-limits run`, `otel-limits autoload`,
`opentelemetry-instrument`, `OTEL_PYTHON_TRACER_PROVIDER`, `enable()`, `enable()` in the parent
process, or a `LimitsPlugin`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Enforcement:
    """The state of enforcement in this process.

    Frameworks are probed when they are imported; until then there are no obstacles.
    """

    source: Source | None = None
    """How it was enabled first; `None` while it is disabled."""
    obstacles: tuple[str, ...] = ()
    """Sentences that explain why limits are not enforced."""
    fallbacks: tuple[str, ...] = ()
    """Sentences about fallbacks in use; limits are enforced."""

    @property
    def is_enforcing(self) -> bool:
        """True if agents are halted at their limits."""
        return self.source is not None and not self.obstacles


class Guard:
    """Determines whether limits can be enforced; logs it once and publishes it as an event.

    Args:
        publish: Publishes an event.
    """

    def __init__(self, publish: Callable[[Event], None]) -> None:
        """Start disabled, with nothing probed."""
        self._publish = publish
        self._source: Source | None = None
        self._strict = False
        self._probed: set[tuple[str, str | None]] = set()
        self._obstacles: list[str] = []
        self._fallbacks: list[str] = []

    def enforcement(self) -> Enforcement:
        """Return the current state."""
        return Enforcement(
            source=self._source,
            obstacles=tuple(self._obstacles),
            fallbacks=tuple(self._fallbacks),
        )

    def switch_on(self, source: Source, *, strict: bool) -> None:
        """Enable. The first source is kept.

        Args:
            source: How it was enabled.
            strict: Exit with status 2 as soon as limits cannot be enforced.
        """
        self._source = self._source or source
        self._strict = strict

    def switch_off(self) -> None:
        """Disable. The results of probes are kept."""
        self._source = None

    @suppress_errors("guard")
    def probe(self, framework: Framework, part: str | None = None) -> None:
        """Probe a framework, or a part of it, once after its import, and publish the result."""
        if self._source is None:
            return
        if (framework.name, part) not in self._probed:
            self._probed.add((framework.name, part))
            gaps = framework.gaps() if part is None else framework.gaps_of(part)
            for sentence in fallback_warnings(gaps):
                self._fallbacks.append(sentence)
                logger.warning("otel-limits: %s Limits are still enforced.", sentence)
            for sentence in obstacles(gaps):
                self._add_obstacle(sentence)
            if any(gap.is_vital and not gap.spares_agents for gap in gaps):
                framework.release()  # a binding that is incomplete could affect agents
        if self._obstacles and self._strict:
            end_process([NOT_ENFORCED % sentence for sentence in self._obstacles])
        self.publish_state()

    @suppress_errors("guard")
    def report_not_enforcing(self, sentence: str) -> None:
        """Log once, and publish, why limits are not enforced."""
        if sentence not in self._obstacles:
            self._add_obstacle(sentence)
            if self._source is not None and self._strict:
                end_process([NOT_ENFORCED % sentence])
            self.publish_state()

    def state(self) -> Enforcing | None:
        """Return whether limits are enforced as an event, or `None` while it is disabled."""
        if self._source is None:
            return None
        return Enforcing(source=self._source, in_force=not self._obstacles)

    def publish_state(self) -> None:
        """Publish whether limits are enforced, also for observers added since."""
        state = self.state()
        if state is not None:
            self._publish(state)

    def _add_obstacle(self, sentence: str) -> None:
        self._obstacles.append(sentence)
        logger.error("otel-limits: %s", NOT_ENFORCED % sentence)


def probed(frameworks: Iterable[Framework]) -> Enforcement:
    """Import and probe every installed framework, in a process where otel-limits is disabled."""
    gaps: list[Gap] = []
    for framework in frameworks:
        with contextlib.suppress(ImportError):  # not installed
            gaps += framework.gaps()
            for part in framework.parts:
                gaps += framework.gaps_of(part)
    return Enforcement(obstacles=tuple(obstacles(gaps)), fallbacks=tuple(fallback_warnings(gaps)))


def obstacles(gaps: Iterable[Gap]) -> list[str]:
    """Explain why limits cannot be enforced, and what to do."""
    return [
        f"{gap.version} has no {gap.name}. {gap.without} Install a release of otel-limits that "
        f"supports {gap.version}, or an earlier version of that package."
        for gap in gaps
        if gap.is_vital
    ]


def fallback_warnings(gaps: Iterable[Gap]) -> list[str]:
    """Describe the fallbacks in use."""
    return [f"{gap.version} has no {gap.name}. {gap.without}" for gap in gaps if not gap.is_vital]


def end_process(sentences: Sequence[str]) -> NoReturn:
    """Write the reasons to standard error and exit with status 2."""
    for sentence in sentences:
        sys.stderr.write(f"otel-limits: {sentence}\n")
    # `os._exit` flushes nothing.
    sys.stdout.flush()
    sys.stderr.flush()
    # Not `SystemExit`: while Python starts, it causes a traceback and status 1, and in a thread it
    # ends only that thread.
    os._exit(2)
