"""`otel-limits doctor` checks a real store for the rights that agents need, and leaves no trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_limits.cli.doctor.doctor_command import findings_of
from otel_limits.cli.doctor.finding import Context
from otel_limits.quotas.redis_scripts import KeyNames
from otel_limits.quotas.store import RETENTION_SECONDS

if TYPE_CHECKING:
    from otel_limits.cli.doctor.finding import Finding
    from tests.quotas.fixtures import Server


def examined(url: str) -> Finding:
    """Return the finding about a store."""
    findings = findings_of("doctor", Context({"OTEL_LIMITS_QUOTA_STORE": url}))
    (finding,) = (each for each in findings if each.name == "quota store")
    return finding


def add_user(server: Server, name: str, without: str) -> None:
    """Add a user with all rights but one."""
    rights = ("on", ">hunter2", "~*", "&*", "+@all", without)
    server.client.execute_command("ACL", "SETUSER", name, *rights)


def test_a_store_that_answers_is_timed_and_left_as_it_was(server: Server) -> None:
    """The test key expires within a second; the marker of the server's run stays for a day."""
    finding = examined(server.url)
    assert finding.status == "ok", finding
    assert finding.text.startswith("Round trip: ")
    assert finding.text.endswith(" (timeout: 2000 ms).")
    keys = set(server.client.keys()) - {KeyNames().marker}
    assert 0 < server.client.ttl(KeyNames().marker) <= RETENTION_SECONDS
    assert all(0 < server.client.pttl(key) <= 1000 for key in keys)


def test_a_user_without_the_right_to_run_scripts_is_a_failure(server: Server) -> None:
    """Agents could reserve nothing."""
    add_user(server, "weak", "-@scripting")
    finding = examined(server.url.replace("redis://", "redis://weak:hunter2@"))
    assert (finding.status, "hunter2" in finding.text) == ("FAIL", False)


def test_a_user_without_the_right_to_write_is_a_failure(server: Server) -> None:
    """For example, on a replica."""
    add_user(server, "reader", "-set")
    finding = examined(server.url.replace("redis://", "redis://reader:hunter2@"))
    assert (finding.status, "hunter2" in finding.text) == ("FAIL", False)
