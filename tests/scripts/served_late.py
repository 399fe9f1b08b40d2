"""A WSGI application that imports its framework in a request. It knows nothing of limits."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable
from typing import Any


def wsgi(_environ: dict[str, Any], start: Callable[..., object]) -> Iterable[bytes]:
    """Answer with how an invocation of an agent ended."""
    call = importlib.import_module("strands_agents").call
    start("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(call()).encode()]
