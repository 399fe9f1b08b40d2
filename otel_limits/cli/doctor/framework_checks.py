"""Checks the installed agent frameworks, without importing them unless they are to be probed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from otel_limits.bindings.known import missing_framework
from otel_limits.bindings.recognition import gaps_on_disk, outside_supported
from otel_limits.bindings.third_party import ThirdPartyFramework
from otel_limits.cli.doctor.finding import Finding, fail, warn
from otel_limits.runtime.autoload import OUTDATED, RENEW, installed_autoload, outdated_autoload
from otel_limits.runtime.guard import Enforcement, obstacles, probed

if TYPE_CHECKING:
    from otel_limits.bindings.framework import Framework, Gap
    from otel_limits.cli.doctor.check_context import Context

NOT_ENFORCED = "Limits cannot be enforced: {}"


def bindings(context: Context) -> Iterator[Finding]:
    """Report bindings of other distributions that are not used."""
    found = context.third_party
    for sentence in found.broken:
        yield fail("bindings", NOT_ENFORCED.format(sentence))
    for sentence in (*found.unused, *found.absent):
        yield warn("bindings", sentence)


def needed_names(context: Context) -> Iterator[Finding]:
    """Report what the frameworks lack."""
    found = (probed if context.probe else _read_on_disk)(context.frameworks)
    for sentence in found.fallbacks:
        yield warn("frameworks", f"{sentence} Limits are still enforced.")
    for sentence in found.obstacles:
        yield fail("frameworks", NOT_ENFORCED.format(sentence))


def _read_on_disk(frameworks: Sequence[Framework]) -> Enforcement:
    """Look for what the frameworks lack without importing them, unless only that could show it."""
    known: list[Gap] = []
    unclear = []
    broken: list[str] = []
    for framework in frameworks:
        if isinstance(framework, ThirdPartyFramework):
            if (sentence := framework.obstacle_on_disk()) is not None:
                broken.append(sentence)
            continue
        gaps, is_unclear = gaps_on_disk(framework)
        known += gaps
        if is_unclear and not gaps:
            unclear.append(framework)
    found = probed(unclear)
    return replace(found, obstacles=(*obstacles(known), *found.obstacles, *broken))


def releases(context: Context) -> Iterator[Finding]:
    """Report releases that otel-limits is not tested with."""
    for framework in context.frameworks:
        if (sentence := outside_supported(framework)) is not None:
            yield warn("releases", sentence)


def autoload(_: Context) -> Iterator[Finding]:
    """Report that autoload is outdated."""
    if (reason := outdated_autoload()) is not None:
        yield warn("autoload", OUTDATED.format(path=installed_autoload(), reason=reason), RENEW)


def missing(_: Context) -> Iterator[Finding]:
    """Report that no framework is installed."""
    # Only a warning: the programs may have their own environment.
    if (sentence := missing_framework()) is not None:
        yield warn("missing framework", sentence)
