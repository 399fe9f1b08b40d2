"""A program to freeze. It limits its agents in code, also those of its child processes.

Prints how an agent ended here and in a spawned child, and what it says of a limit in USD.
"""

from __future__ import annotations

import json
import multiprocessing

import otel_limits

# Before `freeze_support`, which does the work of a child and ends it.
otel_limits.enable(max_turns=3)

import served  # type: ignore[import-not-found, unused-ignore]  # noqa: E402  in this folder


def main() -> None:
    """Call the agents."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        calls = {"own": served.call(), "child": pool.apply(served.call)}
    try:
        otel_limits.enable(max_cost_usd=1)
    except otel_limits.ConfigurationError as error:
        calls["prices"] = str(error)
    print(json.dumps(calls))  # noqa: T201  its output


if __name__ == "__main__":
    multiprocessing.freeze_support()
    main()
