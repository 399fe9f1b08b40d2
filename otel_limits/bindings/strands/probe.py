"""Checks that all used names of Strands exist, private and public ones."""

from __future__ import annotations

import dataclasses
import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from otel_limits.bindings.framework import Gap
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

ATTACHED_BY: Final = ("Agent.add_hook", "Agent.add_middleware")
"""Public methods of agents, looked up only when called."""

HOOKS: Final = "strands.hooks.registry"
CALLBACKS: Final = "HookRegistry.get_callbacks_for"
"""Shows which hooks an agent has already, in their order."""

CANCEL: Final = "Agent.cancel"

STREAM: Final = "Agent.stream_async"

DIRECT: Final = "Agent.structured_output_async"

MODEL: Final = "strands.models.model"

GROUPS: Final = {
    "strands.multiagent.graph": "Graph.stream_async",
    "strands.multiagent.swarm": "Swarm.stream_async",
}
"""Methods of groups, whose agents share limits."""

SESSIONS: Final = tuple(
    f"BidiAgent.{name}" for name in ("start", "send", "receive", "stop", "cancel", "add_hook")
)
"""Methods of realtime agents."""

CLIENTS: Final = ("strands.models.openai", "strands.models.openai_responses")
"""Models of vendors, whose client need not be installed."""

UNFOLLOWED: Final = "Without it no agent can be tracked or halted."


def gaps() -> tuple[Gap, ...]:
    """Return the missing names.

    Raises:
        ImportError: Strands is not installed.
    """
    try:
        import_module(AGENT)  # complete, before its parts are checked
    except ImportError as error:
        # A release without the module, or one that fails to import, is an installed one.
        if find_spec(AGENT.partition(".")[0]) is None:
            raise
        if error.name == AGENT:
            return (_gap(AGENT, UNFOLLOWED, is_vital=True),)
        return (_gap(f"importable {AGENT} ({error})", UNFOLLOWED, is_vital=True),)
    optional = {*CLIENTS, REALTIME_AGENT, REALTIME_LOOP}
    core = {each.module for each in PRIVATE_NAMES} - optional
    return (*_private_gaps(core), *_public_gaps(), *_gaps_of_models())


def _private_gaps(modules: Collection[str]) -> Iterator[Gap]:
    for each in PRIVATE_NAMES:
        if each.module in modules and not each.exists:
            yield _gap(f"{each.module}.{each.name}", each.without, is_vital=False)


def _public_gaps() -> Iterator[Gap]:
    # `stream_async` replaces missing methods that start and end the span of an invocation.
    needed = (
        ATTACHED_BY if all(found(AGENT, name) for name in SPAN_METHODS) else (*ATTACHED_BY, STREAM)
    )
    for name in needed:
        if found(AGENT, name) is None:
            yield _gap(f"{AGENT}.{name}", UNFOLLOWED, is_vital=True)
    if found(HOOKS, CALLBACKS) is None:
        yield _gap(f"{HOOKS}.{CALLBACKS}", UNFOLLOWED, is_vital=True)
    if found(AGENT, CANCEL) is None:
        without = "Deadlines and kills take effect before the next model call only."
        yield _gap(f"{AGENT}.{CANCEL}", without, is_vital=False)
    if found(AGENT, DIRECT) is None:
        without = "agent.structured_output(), which other releases have, is not tracked."
        yield _gap(f"{AGENT}.{DIRECT}", without, is_vital=False)
    try:
        # These import every other name, so a missing one raises here.
        import otel_limits.bindings.strands.patches
        import otel_limits.bindings.strands.tracked_requests  # noqa: F401
    except ImportError as error:
        yield _gap(_name_in(error), UNFOLLOWED, is_vital=True)


def _gaps_of_models() -> Iterator[Gap]:
    if found(MODEL, "Model.stream") is None:
        without = "Without it no model call can be counted."
        yield _gap(f"{MODEL}.Model.stream", without, is_vital=True)
    if found(MODEL, "Model.structured_output") is None:
        without = "model.structured_output(), which other releases have, is not tracked."
        yield _gap(f"{MODEL}.Model.structured_output", without, is_vital=False)


def gaps_of(part: str) -> tuple[Gap, ...]:
    """Return the missing names of groups, of realtime agents, or of a vendor's imported models."""
    if part == REALTIME_AGENT:
        return (*_private_gaps([REALTIME_AGENT, REALTIME_LOOP]), *_gaps_of_sessions())
    return _gaps_of_group(part) if part in GROUPS else tuple(_private_gaps([part]))


def _gaps_of_sessions() -> Iterator[Gap]:
    without = "Without it sessions of realtime agents cannot be limited. Other agents are."
    missing = [f"{REALTIME_AGENT}.{name}" for name in SESSIONS if not found(REALTIME_AGENT, name)]
    try:
        import otel_limits.bindings.strands.bidi  # noqa: F401  imports every other name
    except ImportError as error:
        missing.append(_name_in(error))
    for name in missing:
        gap = _gap(name, without, is_vital=True)
        yield dataclasses.replace(gap, spares_agents=True)


def _gaps_of_group(module: str) -> tuple[Gap, ...]:
    name = GROUPS[module]
    if found(module, name) is not None:
        return ()
    without = (
        "Without it the agents of a group cannot be limited together; each of them is limited "
        "alone."
    )
    gap = _gap(f"{module}.{name}", without, is_vital=True)
    return (dataclasses.replace(gap, spares_agents=True),)


def _name_in(error: ImportError) -> str:
    """Return the name that could not be imported, without a file path."""
    name = re.match(r"cannot import name '(\w+)'", str(error))
    return f"{error.name}.{name[1]}" if name else str(error.name or error)


def _gap(name: str, without: str, *, is_vital: bool) -> Gap:
    return Gap(name=name, version=_version(), without=without, is_vital=is_vital)


def _version() -> str:
    """Return the release; frozen applications may lack its metadata."""
    try:
        return f"strands-agents {version('strands-agents')}"
    except PackageNotFoundError:
        return "strands-agents"
