"""Servers that are too old for quotas are reported, with the version that was found.

The replies are those of a real server, whose version a proxy changes.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Final

import pytest

from otel_limits import cli
from otel_limits.cli.doctor.doctor_command import findings_of
from otel_limits.cli.doctor.finding import Context
from otel_limits.quotas.redis_scripts import KeyNames
from otel_limits.quotas.redis_store import needed
from otel_limits.testing import ScriptedModel, says
from tests.quotas.fixtures import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold, Server, Wire

CALLS: Final = {"model_calls": 5, "window": "month"}
NEEDED: Final = "but quotas need Redis 6.2 or Valkey 7.2 or later. Upgrade it."


def change_version(server: Server, wire: Wire, name: str, version: str) -> None:
    """Let clients read this version in the replies of the server."""
    info = server.client.info("server")
    # Replace a line, and keep its length.
    replaced = "run_id" if name == "valkey" else "redis_version"
    line = f"{replaced}:{info[replaced]}"
    wire.replaced = {line.encode(): f"{name}_version:{version}".ljust(len(line)).encode()}


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name a policy file with a quota."""
    path = tmp_path / "policy.yaml"
    path.write_text(json.dumps({"quotas": {"calls": CALLS}}))
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))


@pytest.mark.usefixtures("policy")
@pytest.mark.parametrize("command", ["check", "quotas"])
@pytest.mark.parametrize(
    "found", [("redis", "6.0.9", "Redis 6.0.9"), ("valkey", "7.1.4", "Valkey 7.1.4")]
)
def test_commands_on_an_old_server_fail(
    server: Server,
    wire: Wire,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    found: tuple[str, str, str],
) -> None:
    """`quotas` would show used keys as unused."""
    name, version, shown = found
    change_version(server, wire, name, version)
    monkeypatch.setenv("OTEL_LIMITS_QUOTA_STORE", wire.url)
    assert cli.main([command]) != 0
    printed = capsys.readouterr()
    assert f"OTEL_LIMITS_QUOTA_STORE: the server is {shown}, {NEEDED}" in printed.err
    assert "Used" not in printed.out


def test_doctor_fails_on_an_old_server(server: Server, wire: Wire) -> None:
    """With the version that was found."""
    change_version(server, wire, "redis", "5.0.9")
    findings = findings_of("doctor", Context({"OTEL_LIMITS_QUOTA_STORE": wire.url}))
    (finding,) = (each for each in findings if each.name == "quota store")
    assert finding.status == "FAIL"
    assert finding.text == f"Unsupported: the server is Redis 5.0.9, {NEEDED}"


def test_start_on_an_old_server_warns_and_enforces(
    hold: Hold,
    make_agent: MakeAgent,
    server: Server,
    wire: Wire,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Counts are right even there, so agents keep running."""
    change_version(server, wire, "redis", "6.0.9")
    with caplog.at_level(logging.WARNING, "otel_limits"):
        hold({"calls": CALLS | {"model_calls": 1}}, wire.url)
        eventually(lambda: f"quota store: the server is Redis 6.0.9, {NEEDED}" in caplog.text)
    agent = make_agent(ScriptedModel([says("done"), says("never")]))
    assert agent("go").stop_reason == "end_turn"
    assert agent("go").stop_reason == "quota_exceeded"


@pytest.mark.usefixtures("policy")
@pytest.mark.parametrize(
    "found",
    [("redis", "6.2.0"), ("redis", "10.0"), ("valkey", "7.2.0"), ("redis", ""), ("redis", "x")],
)
def test_check_on_a_recent_or_unknown_version_passes(
    server: Server,
    wire: Wire,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    found: tuple[str, str],
) -> None:
    """Hosted services can hide it."""
    change_version(server, wire, *found)
    monkeypatch.setenv("OTEL_LIMITS_QUOTA_STORE", wire.url)
    assert cli.main(["check"]) == 0
    assert "Upgrade" not in capsys.readouterr().err


@pytest.mark.usefixtures("policy")
def test_denied_version_is_a_missing_right_only(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`check` names the rule to add, and no version."""
    rights = ("on", ">hunter2", *needed(KeyNames()).split(), "-info")
    server.client.execute_command("ACL", "SETUSER", "agents", *rights)
    url = server.url.replace("redis://", "redis://agents:hunter2@")
    monkeypatch.setenv("OTEL_LIMITS_QUOTA_STORE", url)
    assert cli.main(["check"]) == 1
    said = capsys.readouterr().err
    assert "ACL SETUSER <user> +info\n" in said
    assert "the server is" not in said
    assert cli.main(["quotas"]) == 0
