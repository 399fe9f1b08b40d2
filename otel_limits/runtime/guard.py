"""Whether limits are enforced in this process, how it was enabled, and what prevents it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NoReturn, TypeAlias

from otel_limits.bindings.recognition import is_importable
from otel_limits.bindings.third_party import BindingError
from otel_limits.core.events import Enforcing, Event
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.secrets import redact_value
from otel_limits.settings.children import note_agent

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
    """The state of enforcement of one framework, or of all, in this process.

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


EVERY_FRAMEWORK: Final = ""
"""Instead of the name of one framework: what concerns all agents of this process."""


class Guard:
    """Determines whether limits can be enforced; logs it once and publishes it as events.

    Each framework has its own state: one that cannot be limited leaves the others as they are.

    Args:
        publish: Publishes an event.
    """

    def __init__(self, publish: Callable[[Event], None]) -> None:
        """Start disabled, with nothing probed."""
        self._publish = publish
        self._source: Source | None = None
        self._strict = False
        self._probed: set[tuple[str, str | None]] = set()
        self._unfit: set[str] = set()
        self._obstacles: dict[str, list[str]] = {EVERY_FRAMEWORK: []}
        self._fallbacks: dict[str, list[str]] = {}
        self._until_off: list[tuple[str, str]] = []
        """Frameworks and obstacles that end when it is disabled."""

    def enforcement(self, framework: str | None = None) -> Enforcement:
        """Return the current state of a framework, by its name, or of all."""
        names = self._obstacles if framework is None else (EVERY_FRAMEWORK, framework)
        return Enforcement(
            source=self._source,
            obstacles=tuple(each for name in names for each in self._obstacles.get(name, ())),
            fallbacks=tuple(each for name in names for each in self._fallbacks.get(name, ())),
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
        """Disable. The results of probes are kept, and failures of this period are forgotten."""
        self._source = None
        self._forget(self._until_off)

    def forget_failure(self) -> None:
        """Forget that an earlier attempt to enable it for all frameworks has failed."""
        self._forget([each for each in self._until_off if each[0] == EVERY_FRAMEWORK])

    def _forget(self, obstacles: Iterable[tuple[str, str]]) -> None:
        for each in tuple(obstacles):
            self._until_off.remove(each)
            framework, sentence = each
            self._obstacles[framework].remove(sentence)

    def is_fit(self, framework: Framework) -> bool:
        """Return whether agents of a framework can be halted, as far as it was probed."""
        return framework.name not in self._unfit

    def probe(self, framework: Framework, part: str | None = None) -> None:
        """Probe a framework, or a part of it, once after its import, and publish the result."""
        name = framework.name
        if self._source is None or (name, part) in self._probed:
            return
        self._probed.add((name, part))
        self._obstacles.setdefault(name, [])
        try:
            gaps = framework.gaps() if part is None else framework.gaps_of(part)
        except (Exception, SystemExit) as error:  # noqa: BLE001  any code of the framework runs here
            self.report_unfit(framework, f"probing {part or name}", error)
            return
        for sentence in fallback_warnings(gaps):
            self._fallbacks.setdefault(name, []).append(sentence)
            logger.warning("otel-limits: %s Limits are still enforced.", sentence)
        # A binding that is incomplete could affect agents.
        if any(gap.still_limited == "none" for gap in gaps):
            self._unfit.add(name)
        for sentence in obstacles(gaps):
            self.report_not_enforcing(sentence, name)
        self.publish_state()

    def report_unfit(self, framework: Framework, action: str, error: BaseException) -> None:
        """Report that no agent of a framework can be halted, because an action failed."""
        self._unfit.add(framework.name)
        self.report_not_enforcing(failure(framework, action, error), framework.name)
        logger.debug("otel-limits: %s failed", action, exc_info=error)

    @suppress_errors("guard")
    def report_not_enforcing(
        self, sentence: str, framework: str = EVERY_FRAMEWORK, *, until_off: bool = False
    ) -> None:
        """Log once, and publish, why limits are not enforced.

        Args:
            sentence: Explains it.
            framework: The name of the framework that it concerns.
            until_off: Forget it when otel-limits is disabled.
        """
        found = self._obstacles.setdefault(framework, [])
        if sentence in found:
            return
        found.append(sentence)
        if until_off:
            self._until_off.append((framework, sentence))
        note_agent()  # of which this process will not know
        logger.error("otel-limits: %s", NOT_ENFORCED % sentence)
        if self._source is not None and self._strict:
            end_process([NOT_ENFORCED % sentence])
        self.publish_state()

    def states(self) -> list[Enforcing]:
        """Return as events whether limits are enforced; none while it is disabled.

        The first is that of all agents, also before a framework is imported. The others are those
        of the frameworks that have been.
        """
        source, for_all = self._source, not self._obstacles[EVERY_FRAMEWORK]
        if source is None:
            return []
        return [
            Enforcing(source=source, framework=name, in_force=for_all and not found)
            for name, found in list(self._obstacles.items())
        ]

    @suppress_errors("guard")
    def publish_state(self) -> None:
        """Publish whether limits are enforced, also for observers added since."""
        for state in self.states():
            self._publish(state)


def probed(frameworks: Iterable[Framework]) -> Enforcement:
    """Import and probe every framework that can be, in a process where otel-limits is disabled."""
    gaps: list[Gap] = []
    failures = []
    for framework in frameworks:
        if not is_importable(framework.module, framework.distribution):
            continue
        try:
            gaps += framework.gaps()
            for part in framework.parts:
                with contextlib.suppress(ImportError):  # not installed
                    gaps += framework.gaps_of(part)
        except (Exception, SystemExit) as error:  # noqa: BLE001  any code of the framework runs here
            failures.append(failure(framework, f"probing {framework.name}", error))
    return Enforcement(
        obstacles=(*failures, *obstacles(gaps)), fallbacks=tuple(fallback_warnings(gaps))
    )


def failure(framework: Framework, action: str, error: BaseException) -> str:
    """Say that no agent of a framework can be halted, because an action failed."""
    if isinstance(error, BindingError):
        return str(error)
    return f"{framework.distribution}: {action} failed ({redact_value(repr(error))})."


def obstacles(gaps: Iterable[Gap]) -> list[str]:
    """Explain why limits cannot be enforced, and what to do."""
    return [
        f"{gap.version} has no {gap.name}. {gap.without} Install a release of otel-limits that "
        f"supports {gap.version}, or an earlier version of that package."
        for gap in gaps
        if gap.still_limited != "all"
    ]


def fallback_warnings(gaps: Iterable[Gap]) -> list[str]:
    """Describe the fallbacks in use."""
    return [
        f"{gap.version} has no {gap.name}. {gap.without}"
        for gap in gaps
        if gap.still_limited == "all"
    ]


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
