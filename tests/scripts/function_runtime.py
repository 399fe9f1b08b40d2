"""An AWS Lambda runtime: it fetches an event, calls the handler, sends the answer.

A stand-in for the runtime client of Lambda, which speaks the same HTTP:
https://docs.aws.amazon.com/lambda/latest/dg/runtimes-api.html. Lambda freezes the process as soon
as it has asked for the next event, with all of its threads.
"""

from __future__ import annotations

import importlib
import json
import os
from typing import Any
from urllib.request import Request, urlopen

API = f"http://{os.environ['AWS_LAMBDA_RUNTIME_API']}/2018-06-01/runtime/invocation"


def send(path: str, body: Any = None) -> Any:
    """Send a request to the service."""
    data = None if body is None else json.dumps(body).encode()
    return urlopen(Request(f"{API}/{path}", data=data), timeout=60)  # noqa: S310  loopback


def main() -> None:
    """Serve events until there is none."""
    module, _, name = os.environ["_HANDLER"].partition(".")
    handler = getattr(importlib.import_module(module), name)
    while True:
        with send("next") as answer:
            if answer.status != 200:
                return
            event, request = json.load(answer), answer.headers["Lambda-Runtime-Aws-Request-Id"]
        send(f"{request}/response", handler(event, None)).close()


if __name__ == "__main__":
    main()
