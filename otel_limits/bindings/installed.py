"""Which agent frameworks are installed, and what to do about a missing one."""

from __future__ import annotations

import contextlib
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from otel_limits.bindings.known import FRAMEWORKS, OURS
from otel_limits.bindings.recognition import is_importable
from otel_limits.core.installing import install_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_limits.bindings.framework import Framework


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


def require(framework: Framework, name: str) -> None:
    """Check that a framework can be imported, before the import of a part of it fails.

    Args:
        framework: The framework.
        name: What needs it, for the error.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    package = framework.module.partition(".")[0]
    if find_spec(package) is None:
        way = install_command(framework.name)
        message = f"{name} needs {framework.distribution}, which is not installed. Run: {way}"
        raise ModuleNotFoundError(message, name=package)


def _is_installed(framework: Framework) -> bool:
    # A framework of another distribution may have the name of its binding's.
    if framework in OURS:
        with contextlib.suppress(PackageNotFoundError):
            return bool(version(framework.distribution))
    return is_importable(framework.module, framework.distribution)
