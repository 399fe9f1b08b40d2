"""Checks that all used names of Strands exist, private and public ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from otel_limits.bindings.framework import Gap
from otel_limits.bindings.recognition import name_in, release, vital_gaps
from otel_limits.bindings.strands.private import (
    AGENT,
    PRIVATE_NAMES,
    REALTIME_AGENT,
    REALTIME_LOOP,
    SPAN_METHODS,
    found,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from otel_limits.bindings.framework import Framework

STREAM: Final = "Agent.stream_async"

REPLACED: Final = {
    (AGENT, "Agent.cancel"): ("Deadlines and kills take effect before the next model call only."),
    (AGENT, "Agent.structured_output_async"): (
        "agent.structured_output(), which other releases have, is not tracked."
    ),
    ("strands.models.model", "Model.structured_output"): (
        "model.structured_output(), which other releases have, is not tracked."
    ),
}
"""Public methods that may be missing, with the consequence."""

GROUPS: Final = {
    "strands.multiagent.graph": "Graph.stream_async",
    "strands.multiagent.swarm": "Swarm.stream_async",
}
"""Methods of groups, whose agents share limits."""

REALTIME: Final = tuple(
    f"BidiAgent.{name}" for name in ("start", "send", "receive", "stop", "cancel", "add_hook")
)
"""Methods of realtime agents."""

CLIENTS: Final = (
    "strands.models.openai",
    "strands.models.openai_responses",
    "strands.models.gemini",
)
"""Models of vendors, whose client need not be installed."""

CORE: Final = {each.module for each in PRIVATE_NAMES} - {*CLIENTS, REALTIME_AGENT, REALTIME_LOOP}
"""Modules of private names that every program imports."""


def gaps(framework: Framework) -> tuple[Gap, ...]:
    """Return the missing names.

    Raises:
        ImportError: Strands is not installed.
    """
    vital = vital_gaps(framework)
    return tuple(vital) or (*_private_gaps(framework, CORE), *_public_gaps(framework))


def _private_gaps(framework: Framework, modules: Collection[str]) -> Iterator[Gap]:
    for each in PRIVATE_NAMES:
        if each.module in modules and not each.exists:
            yield _gap(framework, f"{each.module}.{each.name}", each.without, "all")


def _public_gaps(framework: Framework) -> Iterator[Gap]:
    # `stream_async` replaces missing methods that start and end the span of an invocation.
    has_spans = all(found(AGENT, name) for name in SPAN_METHODS)
    if not has_spans and found(AGENT, STREAM) is None:
        yield _gap(framework, f"{AGENT}.{STREAM}", framework.without, "none")
    for (module, name), without in REPLACED.items():
        if found(module, name) is None:
            yield _gap(framework, f"{module}.{name}", without, "all")


def gaps_of(framework: Framework, part: str) -> tuple[Gap, ...]:
    """Return the missing names of groups, of realtime agents, or of a vendor's imported models."""
    if part == REALTIME_AGENT:
        private = _private_gaps(framework, [REALTIME_AGENT, REALTIME_LOOP])
        return (*private, *_gaps_of_realtime(framework))
    if part in GROUPS:
        return _gaps_of_group(framework, part)
    return tuple(_private_gaps(framework, [part]))


def _gaps_of_realtime(framework: Framework) -> Iterator[Gap]:
    without = "Without it realtime agents cannot be limited. Other agents are."
    missing = [f"{REALTIME_AGENT}.{name}" for name in REALTIME if not found(REALTIME_AGENT, name)]
    try:
        import otel_limits.bindings.strands.realtime  # noqa: F401  imports every other name
    except ImportError as error:
        missing.append(name_in(error))
    for name in missing:
        yield _gap(framework, name, without, "some")


def _gaps_of_group(framework: Framework, module: str) -> tuple[Gap, ...]:
    name = GROUPS[module]
    if found(module, name) is not None:
        return ()
    without = (
        "Without it the agents of a group cannot be limited together; each of them is limited "
        "alone."
    )
    return (_gap(framework, f"{module}.{name}", without, "some"),)


def _gap(
    framework: Framework, name: str, without: str, still_limited: Literal["all", "some", "none"]
) -> Gap:
    return Gap(name=name, version=release(framework), without=without, still_limited=still_limited)
