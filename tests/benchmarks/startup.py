"""Startup time added to a program that imports Strands and the OpenTelemetry SDK."""

from __future__ import annotations

import compileall
import json
import sys
import time
from collections.abc import Callable
from importlib import import_module

from tests.paths import ROOT


def milliseconds(do: Callable[[], object]) -> float:
    """Return the CPU time of `do` in this thread. Another thread reads the price list."""
    start = time.thread_time()
    do()
    return (time.thread_time() - start) * 1_000


def measure() -> dict[str, float]:
    """Import and enable an installed package, with its bytecode compiled."""
    compileall.compile_dir(ROOT / "otel_limits", quiet=1)
    for name in ("strands", "opentelemetry.sdk.trace"):
        import_module(name)
    imported = milliseconds(lambda: import_module("otel_limits"))
    enabled = milliseconds(lambda: import_module("otel_limits").enable())
    return {"import": imported, "enable": enabled}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure()) + "\n")
