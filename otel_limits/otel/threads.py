"""Lets plain threads inherit the context of the thread that starts them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.instrumentation.threading import ThreadingInstrumentor

if TYPE_CHECKING:
    from typing_extensions import Self


class OwnThreadingInstrumentor(ThreadingInstrumentor):  # type: ignore[misc]
    """OpenTelemetry's instrumentor of threads, but not the instance that applications use.

    Strands instruments that one without checking whether it is instrumented already, which logs a
    warning.
    """

    def __new__(cls) -> Self:
        """Create a separate instance."""
        return object.__new__(cls)


def carry_context_into_threads() -> None:
    """Instrument threads and thread pools, unless the application has done so."""
    if not ThreadingInstrumentor().is_instrumented_by_opentelemetry:
        OwnThreadingInstrumentor().instrument(skip_dep_check=True)
