"""A misspelt option of a command that needs a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from otel_limits.cli import main

if TYPE_CHECKING:
    import pytest


def test_a_quota_is_asked_about(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By its name in the policy file; no store is asked before."""
    path = tmp_path / "limits.yaml"
    path.write_text("quotas: {tenants: {tokens: 100000, window: day}}", encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))
    monkeypatch.setenv("OTEL_LIMITS_QUOTA_STORE", "redis://127.0.0.1:1/0")
    assert main(["quotas", "reset", "tenant"]) != 0
    assert capsys.readouterr().err == (
        "otel-limits: No quota named 'tenant'. Did you mean tenants?\n"
    )
