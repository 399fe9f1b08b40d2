"""Times what is added to the start of a program that has Strands and the OpenTelemetry SDK."""

from __future__ import annotations

import compileall
import json
import sys
import time
from collections.abc import Callable
from importlib import import_module

from tests.benchmarks.rounds import ROOT


def milliseconds(do: Callable[[], object]) -> float:
    """CPU time that `do` takes from its caller; the price list is read in a thread beside it."""
    start = time.thread_time()
    do()
    return (time.thread_time() - start) * 1_000


def measure() -> dict[str, float]:
    """Import, then enable, as an application does that has us installed, bytecode included."""
    compileall.compile_dir(ROOT / "otel_limits", quiet=1)
    for name in ("strands", "opentelemetry.sdk.trace"):
        import_module(name)
    imported = milliseconds(lambda: import_module("otel_limits"))
    enabled = milliseconds(lambda: import_module("otel_limits").enable())
    return {"import": imported, "enable": enabled}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure()) + "\n")
