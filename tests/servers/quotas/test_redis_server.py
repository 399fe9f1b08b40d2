"""Servers for quotas: the rights that quotas need, and versions that are too old."""

from __future__ import annotations

import importlib.resources
import json
import logging
import re
from typing import TYPE_CHECKING, Final, Protocol

import pytest

from otel_limits import cli
from otel_limits.cli.doctor.doctor_command import findings_of
from otel_limits.cli.doctor.finding import Context
from otel_limits.quotas.redis_scripts import KeyNames
from otel_limits.quotas.redis_store import COMMANDS, needed
from otel_limits.quotas.store import StorePlace
from otel_limits.testing import ScriptedModel, endless, says
from tests.drills import deployments
from tests.processes import free_port
from tests.quotas.fixtures import eventually, open_redis

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold, Server, Wire


CALLS = {"model_calls": 3, "window": "P366D", "key": "agent", "on_exceeded": "wait"}


class Run(Protocol):
    """Runs a command."""

    def __call__(self, url: str, *arguments: str) -> tuple[int, str]:
        """Return its exit status and standard error."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command where one quota is set, on a given store."""

    def type_in(url: str, *arguments: str) -> tuple[int, str]:
        path = tmp_path / "policy.yaml"
        path.write_text(json.dumps({"quotas": {"calls": CALLS}}))
        monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))
        monkeypatch.setenv("OTEL_LIMITS_QUOTA_STORE", url)
        return cli.main(arguments), capsys.readouterr().err

    return type_in


def add_user(server: Server, *rules: str) -> str:
    """Add a user with the documented rights, changed by more rules; return its URL."""
    rights = ("reset", "on", ">hunter2", *needed(KeyNames()).split(), *rules)
    server.client.execute_command("ACL", "SETUSER", "agents", *rights)
    return server.url.replace("redis://", "redis://agents:hunter2@")


def test_the_documented_rule_is_what_is_needed() -> None:
    """Verbatim, so operators can copy it."""
    text = (importlib.resources.files("otel_limits") / "docs" / "quota-store.md").read_text("utf-8")
    assert f"ACL SETUSER agents on >password {needed(KeyNames())}\n" in text
    assert needed(KeyNames("prod")).startswith("~{otel_limits:prod}* &{otel_limits:prod}* +")


def test_every_command_of_a_script_is_granted() -> None:
    """Also of those that run rarely: renewals of long calls, and restoring after a restart."""
    folder = importlib.resources.files("otel_limits.quotas") / "scripts"
    scripts = "".join(each.read_text("utf-8") for each in folder.iterdir())
    called = {each.lower() for each in re.findall(r"redis\.p?call\('(\w+)'", scripts)}
    assert called <= COMMANDS.keys()


def test_the_documented_rights_are_enough(
    hold: Hold,
    make_agent: MakeAgent,
    server: Server,
    run: Run,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """For agents, which share and wait, and for every command."""
    url = add_user(server)
    assert run(url, "check")[0] == 0
    hold({"calls": CALLS}, url)
    agent = make_agent(ScriptedModel(endless(says("done"))), name="joe")
    assert agent("go").stop_reason == "end_turn"
    eventually(lambda: server.client.zcard("{otel_limits}:sharing") == 1)
    for command in (
        ("quotas",),
        ("quotas", "grant", "calls", "joe", "5", "--until", "2999-01-01"),
        ("quotas", "revoke", "calls", "joe"),
        ("quotas", "block", "calls", "joe"),
        ("quotas", "unblock", "calls", "joe"),
        ("quotas", "reset", "calls", "joe"),
        ("kill", "--agent", "missing"),
    ):
        assert run(url, *command) == (0, "")
    assert "may not" not in caplog.text


@pytest.mark.parametrize("namespace", ["", "prod"])
def test_every_right_that_is_missing_is_named(server: Server, namespace: str) -> None:
    """Each command, the keys, the channels; and nothing stays on the server."""
    names, before = KeyNames(namespace), server.client.keys()
    rules = {f"-{each}": f"+{each}" for each in (*COMMANDS, "subscribe")}
    rules |= {"resetkeys": f"~{names.tag}*", "resetchannels": f"&{names.tag}*"}
    found = {}
    for rule in rules:
        url = add_user(server, *needed(names).split(), "resetkeys", f"~{names.tag}*", rule)
        store = open_redis(StorePlace(url, 2.0, namespace))
        found[rule] = store.missing_rights()
        store.close()
    assert found == {rule: [missing] for rule, missing in rules.items()}
    eventually(lambda: server.client.keys() == before)


def test_check_names_the_missing_acl_rule(server: Server, run: Run) -> None:
    """As an error, since agents could reserve nothing; without the password."""
    status, said = run(add_user(server, "-hset", "resetkeys", "~other*"), "check")
    assert status == 1
    assert "OTEL_LIMITS_QUOTA_STORE: its user lacks permissions." in said
    assert "ACL SETUSER <user> +hset ~{otel_limits}*" in said
    assert "hunter2" not in said


def test_check_warns_of_a_user_denied_subscribing(server: Server, run: Run) -> None:
    """Quotas are still enforced."""
    status, said = run(add_user(server, "resetchannels"), "check")
    assert status == 0
    assert "polling once a second" in said
    assert "ACL SETUSER <user> &{otel_limits}*" in said


def test_check_reports_a_wrong_password(server: Server, run: Run) -> None:
    """As an error, since every quota would refuse; without showing the password."""
    status, said = run(add_user(server).replace("hunter2", "hunter3"), "check")
    assert status == 1
    assert "OTEL_LIMITS_QUOTA_STORE: authentication failed (" in said
    assert "hunter" not in said


def test_check_reports_rights_needed_to_discover_the_server(run: Run, tmp_path: Path) -> None:
    """In a cluster, which provides its topology."""
    with deployments.cluster(tmp_path, has_wires=False) as place:
        for rule in ("cluster|slots", "command"):
            for server in place.servers:
                deployments.admit_agents(server)
                server.client.execute_command("ACL", "SETUSER", "agents", f"-{rule}")
            status, said = run(place.url, "check")
            assert (status, f"SETUSER <user> +{rule}\n" in said) == (1, True), said


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [("maxmemory", "1", "used memory"), ("min-replicas-to-write", "1", "NOREPLICAS|Not enough")],
)
def test_check_reports_a_store_that_rejects_writes(
    own_server: Server, run: Run, setting: str, value: str, reason: str
) -> None:
    """Its memory is used up, or it has lost its replicas: agents could reserve nothing."""
    own_server.client.config_set(setting, value)
    status, said = run(own_server.url, "check")
    assert status == 0
    assert re.search(rf"Cannot write to the quota store \(.*({reason})", said)


def test_check_warns_of_an_unreachable_store(run: Run) -> None:
    """It may be reachable from elsewhere only, so the settings can be valid."""
    status, said = run(f"redis://:hunter2@127.0.0.1:{free_port()}/0", "check")
    assert status == 0
    assert "Quota store unavailable" in said
    assert "permissions not tested" in said
    assert "hunter2" not in said


# --- servers that are too old ---------------------------------------------------------------------

CALLS_A_MONTH: Final = {"model_calls": 5, "window": "month"}
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
    path.write_text(json.dumps({"quotas": {"calls": CALLS_A_MONTH}}))
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
        hold({"calls": CALLS_A_MONTH | {"model_calls": 1}}, wire.url)
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
