"""Imports of programs with and without quotas."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

UNTOUCHED = """
import sys
import otel_limits
from strands import Agent
from otel_limits.testing import ScriptedModel, says
otel_limits.enable()
Agent(model=ScriptedModel([says("done")]), callback_handler=None)("go")
assert otel_limits.disable() is None
known = {name for name in sys.modules if name.startswith(("otel_limits.quotas.", "redis"))}
known -= {"otel_limits.quotas.stores", "otel_limits.quotas.windows"}  # what settings may say
sys.exit(repr(known) if known else 0)
"""


@pytest.mark.parametrize("policy", [None, "defaults: {limits: {max_turns: 5}}"])
def test_quota_modules_are_not_imported_without_quotas(policy: str | None, tmp_path: Path) -> None:
    """Neither quota modules nor the store client load during a whole invocation."""
    variables = {"OTEL_LIMITS_QUIET": "true", "OTEL_LIMITS_MAX_TURNS": "5"}
    if policy is not None:
        variables["OTEL_LIMITS_POLICY"] = str(tmp_path / "limits.yaml")
    (tmp_path / "limits.yaml").write_text(policy or "")
    done = subprocess.run(
        [sys.executable, "-c", UNTOUCHED],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


IN_MEMORY = """
import sys
import otel_limits
from strands import Agent
from otel_limits.runs.registry import LIVE
from otel_limits.testing import ScriptedModel, says
otel_limits.enable()
agent = Agent(model=ScriptedModel([says("done")]), callback_handler=None)
print([agent("go").stop_reason for _ in range(2)])
sys.exit(any(name.startswith(("redis", "otel_limits.quotas.redis")) for name in sys.modules))
"""


@pytest.mark.parametrize("url", [None, "memory://"])
def test_quotas_in_memory_import_no_client(url: str | None, tmp_path: Path) -> None:
    """Users without Redis neither need its client nor pay for its import."""
    policy = tmp_path / "limits.yaml"
    policy.write_text("quotas: {calls: {model_calls: 1, window: month}}")
    variables = {"OTEL_LIMITS_POLICY": str(policy)}
    if url is not None:
        variables["OTEL_LIMITS_QUOTA_STORE"] = url
    done = subprocess.run(
        [sys.executable, "-c", IN_MEMORY],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "['end_turn', 'quota_exceeded']\n")
