"""The agent frameworks that are followed: one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from otel_limits.bindings.strands.strands_framework import STRANDS

if TYPE_CHECKING:
    from otel_limits.bindings.framework import Framework

FRAMEWORKS: Final[tuple[Framework, ...]] = (STRANDS,)
