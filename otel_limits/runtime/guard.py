"""On guard: whether limits are in force in this process, by which way, and why not."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn, TypeAlias

from otel_limits.core.events import Enforcing, Event
from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from otel_limits.bindings.framework import Framework, Gap

logger = logging.getLogger("otel_limits")

Source: TypeAlias = Literal["run", "autoload", "instrumentor", "provider", "code", "plugin"]
"""By which way otel-limits was switched on: `otel-limits run`, `otel-limits autoload`,
`opentelemetry-instrument`, `OTEL_PYTHON_TRACER_PROVIDER`, `enable()`, or a `LimitsPlugin`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Enforcement:
    """What is known of the limits of this process.

    Frameworks are probed when they are imported: before that nothing stands in the way.
    """

    source: Source | None = None
    """By which way it was switched on first; `None` while it is off."""
    obstacles: tuple[str, ...] = ()
    """Why no limit is in force, a sentence each."""
    weakened: tuple[str, ...] = ()
    """What is done in another way than it should be, a sentence each; limits are in force."""

    @property
    def in_force(self) -> bool:
        """True where agents are stopped at their limits."""
        return self.source is not None and not self.obstacles


class Guard:
    """Finds out once whether limits can be in force, says it once, and tells it as an event.

    Args:
        publish: Takes events.
    """

    def __init__(self, publish: Callable[[Event], None]) -> None:
        """Begin switched off, with nothing probed."""
        self._publish = publish
        self._source: Source | None = None
        self._strict = False
        self._probed: set[tuple[str, str | None]] = set()
        self._obstacles: list[str] = []
        self._weakened: list[str] = []

    def enforcement(self) -> Enforcement:
        """Return what is known now."""
        return Enforcement(
            source=self._source,
            obstacles=tuple(self._obstacles),
            weakened=tuple(self._weakened),
        )

    def switch_on(self, source: Source, *, strict: bool) -> None:
        """Agents are to be limited; the first way in which that was asked for is what counts.

        Args:
            source: By which way.
            strict: End the process with status 2 as soon as no limit can be in force.
        """
        self._source = self._source or source
        self._strict = strict

    def switch_off(self) -> None:
        """No agent is to be limited any more; what was probed stays known."""
        self._source = None

    @suppress_errors("guard")
    def probe(self, framework: Framework, part: str | None = None) -> None:
        """Look at what was just imported of a framework, once, and tell how it stands."""
        if self._source is None:
            return
        if (framework.name, part) not in self._probed:
            self._probed.add((framework.name, part))
            gaps = framework.gaps() if part is None else framework.gaps_of(part)
            for sentence in weaknesses(gaps):
                self._weakened.append(sentence)
                logger.warning("otel-limits: %s Every limit stays in force.", sentence)
            for sentence in obstacles(gaps):
                self._obstruct(sentence)
            if any(gap.is_vital and not gap.spares_agents for gap in gaps):
                framework.release()  # an agent must not feel a binding that is only half there
        if self._obstacles and self._strict:
            end_process(_in_full(self._obstacles))
        self.tell()

    @suppress_errors("guard")
    def obstruct(self, sentence: str) -> None:
        """Something keeps limits from being in force: say it once, and tell it."""
        if sentence not in self._obstacles:
            self._obstruct(sentence)
            if self._strict:
                end_process(_in_full([sentence]))
            self.tell()

    def tell(self) -> None:
        """Tell whether limits are in force, also those who have begun to observe since."""
        if self._source is not None:
            self._publish(Enforcing(source=self._source, in_force=not self._obstacles))

    def _obstruct(self, sentence: str) -> None:
        self._obstacles.append(sentence)
        logger.error("otel-limits: no limit is in force: %s", sentence)


def probed(frameworks: Iterable[Framework]) -> Enforcement:
    """Import and probe every framework that is installed, in a process that is not switched on."""
    gaps: list[Gap] = []
    for framework in frameworks:
        with contextlib.suppress(ImportError):  # not installed: it has no agents to be limited
            gaps += framework.gaps()
            for part in framework.parts:
                gaps += framework.gaps_of(part)
    return Enforcement(obstacles=tuple(obstacles(gaps)), weakened=tuple(weaknesses(gaps)))


def obstacles(gaps: Iterable[Gap]) -> list[str]:
    """Say why no limit can be in force, and what to do."""
    return [
        f"{gap.version} has no {gap.name}. {gap.without} Install the release of otel-limits that "
        "knows it, or the one before it."
        for gap in gaps
        if gap.is_vital
    ]


def weaknesses(gaps: Iterable[Gap]) -> list[str]:
    """Say what is done in another way than it should be."""
    return [f"{gap.version} has no {gap.name}. {gap.without}" for gap in gaps if not gap.is_vital]


def end_process(sentences: Sequence[str]) -> NoReturn:
    """Say why on standard error, and end the process with status 2."""
    for sentence in sentences:
        sys.stderr.write(f"otel-limits: {sentence}\n")
    # `os._exit` flushes nothing.
    sys.stdout.flush()
    sys.stderr.flush()
    # `SystemExit` would not end it: while Python starts it leads to a traceback and status 1, and
    # in a thread it ends that thread alone.
    os._exit(2)


def _in_full(sentences: Sequence[str]) -> list[str]:
    return [f"No limit is in force: {sentence}" for sentence in sentences]
