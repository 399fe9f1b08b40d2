"""Starts programs as forks of one that has imported what they share.

Most of the time of a program with agents goes into the imports of packages that frameworks need. A
fork begins with these, and imports frameworks and otel-limits itself.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from otel_limits.settings.children import OFFERED, path_with_hook
from tests.cpu import SECONDS_OF_FORKS
from tests.launching import Ended, fresh_environment
from tests.paths import SCRIPTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PROGRAM: Final = str(SCRIPTS / "forks.py")

NEEDED_BY_STRANDS: Final = (
    "import boto3, docstring_parser, genai_prices, httpx, jsonschema, mcp, "
    "opentelemetry.sdk.metrics, opentelemetry.sdk.trace, packaging.version, prometheus_client, "
    "pydantic, sqlalchemy.dialects.sqlite, sqlite3, watchdog.observers, wrapt, yaml"
)
"""Packages that Strands and otel-limits import."""

NEEDED_BY_SDK: Final = (
    "import genai_prices, griffe, mcp, openai.types.responses, opentelemetry.sdk.metrics, "
    "opentelemetry.sdk.trace, prometheus_client, sqlalchemy.dialects.sqlite, sqlite3, trio, "
    "websockets, wrapt"
)
"""Packages that the OpenAI Agents SDK and otel-limits import."""

NEEDED_BY_LANGGRAPH: Final = (
    "import langchain_core.messages, langgraph_sdk, langsmith.client, langsmith.run_helpers"
)
"""Packages that LangGraph imports, without what otel-limits replaces in LangChain."""

NEEDED: Final = f"{NEEDED_BY_STRANDS}\n{NEEDED_BY_SDK}\n{NEEDED_BY_LANGGRAPH}"
"""Packages that all frameworks import."""


class Forking:
    """A Python that forks a process for each program."""

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        self._process = process
        self._directory = directory

    def run(self, code: str, *arguments: str, **variables: str) -> Ended:
        """Run a program to its end as `otel-limits run` would, without warnings."""
        path = path_with_hook(variables.get("PYTHONPATH"))
        note = str(self._directory / "note")
        environ = fresh_environment(**{**variables, "PYTHONPATH": path, OFFERED: note})
        return self._execute(code, arguments, environ, runs=True)

    def execute(
        self, code: str, *arguments: str, environ: Mapping[str, str] | None = None
    ) -> Ended:
        """Run a program to its end, without warnings."""
        environ = fresh_environment() if environ is None else environ
        return self._execute(code, arguments, environ, runs=False)

    def _execute(
        self, code: str, arguments: Sequence[str], environ: Mapping[str, str], *, runs: bool
    ) -> Ended:
        output, log = self._directory / "output", self._directory / "log"
        output.unlink(missing_ok=True)
        log.unlink(missing_ok=True)
        request = {
            "code": code,
            "arguments": arguments,
            "environ": dict(environ),
            "runs": runs,
            "output": str(output),
            "log": str(log),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "it could not be started"
        status, seconds = answer.split()
        SECONDS_OF_FORKS[self._process.pid] += float(seconds)
        return Ended(
            int(status), output.read_text(encoding="utf-8"), log.read_text(encoding="utf-8")
        )


@contextlib.contextmanager
def forking(imports: str, python: str = sys.executable) -> Iterator[Forking]:
    """Start a Python with these imports, and end it afterwards."""
    with (
        tempfile.TemporaryDirectory() as directory,
        subprocess.Popen(
            [python, "-W", "ignore", PROGRAM, imports],
            env=fresh_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        try:
            yield Forking(process, Path(directory))
        finally:
            process.communicate()
            SECONDS_OF_FORKS.pop(process.pid, None)  # from now on they are those of a child
