"""The supported agent frameworks, which are installed, and what a halt left in results."""

from __future__ import annotations

import contextlib
import functools
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.entry_points import EntryPoint, Installed, installed_entry_points
from otel_limits.bindings.langchain.langchain_framework import LANGCHAIN
from otel_limits.bindings.openai_agents.openai_agents_framework import OPENAI_AGENTS
from otel_limits.bindings.recognition import is_importable
from otel_limits.bindings.strands.strands_framework import STRANDS
from otel_limits.bindings.third_party import BindingError, ThirdPartyFramework
from otel_limits.core.events import stop_from_json
from otel_limits.core.installing import install_command
from otel_limits.otel.kinds import OWN_SPANS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from otel_limits.bindings.base_framework import BaseFramework
    from otel_limits.bindings.framework import Framework
    from otel_limits.core.events import Stop
    from otel_limits.otel.kinds import SpanNames


OURS: Final[tuple[BaseFramework, ...]] = (STRANDS, LANGCHAIN, OPENAI_AGENTS)
"""The frameworks with a binding in otel-limits."""

FRAMEWORKS: Final[list[Framework]] = [*OURS]
"""Those, and the ones of other distributions once `know` has added them."""


def know(entry_points: Iterable[EntryPoint]) -> None:
    """Add frameworks of other distributions. Idempotent."""
    known = {framework.name for framework in FRAMEWORKS}
    FRAMEWORKS.extend(
        ThirdPartyFramework(each) for each in entry_points if each.waits_for not in known
    )


def know_installed() -> Installed:
    """Add the frameworks of other distributions in this environment, and return what was read."""
    installed = installed_entry_points()
    know(installed.entry_points)
    return installed


def known_entry_points() -> Installed:
    """Return the frameworks of other distributions that were added."""
    third_party = (each for each in FRAMEWORKS if isinstance(each, ThirdPartyFramework))
    return Installed(tuple(each.entry_point for each in third_party))


@functools.cache
def successes() -> frozenset[str]:
    """Return the stop reasons of invocations that answered, in all frameworks of this environment.

    Only the bindings of other distributions know theirs, so they are imported.
    """
    know_installed()
    for framework in FRAMEWORKS:
        if isinstance(framework, ThirdPartyFramework):
            with contextlib.suppress(BindingError):  # `check` reports it
                framework.load()
    return frozenset(reason for framework in FRAMEWORKS for reason in framework.successes)


def own_limits() -> Mapping[str, str]:
    """Return where the limits of our frameworks themselves are set, by their stop reasons."""
    return {reason: place for each in OURS for reason, place in each.own_limits.items()}


def span_names(frameworks: Iterable[Framework] = OURS) -> Iterator[SpanNames]:
    """Yield the names of spans of invocations, those of frameworks and our own."""
    yield OWN_SPANS
    for framework in frameworks:
        if framework.spans is not None:
            yield framework.spans


def is_synthetic(message: Mapping[str, Any]) -> bool:
    """Return whether `message` was written by a halt, not by a model.

    A model's answer is never synthetic, even if the provider reported zero tokens for it.
    """
    markers = (framework.marker_of(message) for framework in FRAMEWORKS)
    return any(marker is not None and marker["synthetic"] is True for marker in markers)


def stop_of(result: Any) -> Stop | None:
    """Return how otel-limits ended the invocation that `result` came from.

    Args:
        result: What an agent, a graph, a swarm or an A2A client returned, live or restored from a
            session, or an exception that it raised.

    Returns:
        The stop with its breach: its own, else that of the first halted agent within a graph, a
        swarm or a delegation. `None` if nothing was halted.
    """
    for framework in FRAMEWORKS:
        if (marker := framework.marker_of(result)) is not None:
            return stop_from_json(marker)
    return next(iter(stops_of(result)), None)


def stops_of(result: Any) -> tuple[Stop, ...]:
    """Return every stop within `result`, in the order in which the agents ended.

    Args:
        result: As for `stop_of`. A node of a graph that was halted twice has two stops.
    """
    found = (tuple(framework.stops_of(result)) for framework in FRAMEWORKS)
    return next((stops for stops in found if stops), ())


# --- installed frameworks -------------------------------------------------------------------------


def install_any() -> str:
    """Return how to install any framework: a command for the first, and the other extras."""
    first, *others = (framework.name for framework in OURS)
    return f"{install_command(first)} (or another extra: {', '.join(others)})"


def installed_frameworks() -> Sequence[Framework]:
    """Return the frameworks that are installed in this environment."""
    return [framework for framework in FRAMEWORKS if _is_installed(framework)]


def missing_framework() -> str | None:
    """Return what to do if no framework is installed, else `None`."""
    if installed_frameworks():
        return None
    return f"No supported agent framework is installed. Run: {install_any()}"


def importable_frameworks() -> Sequence[Framework]:
    """Return the frameworks that programs of this environment would import."""
    return [each for each in FRAMEWORKS if is_importable(each.module, each.distribution)]


def is_there(framework: Framework) -> bool:
    """Return whether a package with the name of a framework can be imported."""
    return find_spec(framework.module.partition(".")[0]) is not None


def require(framework: Framework, name: str) -> None:
    """Check that a framework can be imported, before the import of a part of it fails.

    Args:
        framework: The framework.
        name: What needs it, for the error.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    if not is_there(framework):
        package = framework.module.partition(".")[0]
        way = install_command(framework.name)
        message = f"{name} needs {framework.distribution}, which is not installed. Run: {way}"
        raise ModuleNotFoundError(message, name=package)


def _is_installed(framework: Framework) -> bool:
    # A framework of another distribution may have the name of its binding's.
    if framework in OURS:
        with contextlib.suppress(PackageNotFoundError):
            return bool(version(framework.distribution))
    return is_importable(framework.module, framework.distribution)
