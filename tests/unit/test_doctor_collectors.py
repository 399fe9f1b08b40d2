"""What `otel-limits doctor` says of the OTLP endpoints that are configured."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.cli.doctor.doctor_command import findings_of
from otel_limits.cli.doctor.finding import Context
from otel_limits.cli.doctor.runaway import sandboxed

if TYPE_CHECKING:
    from pathlib import Path

    from otel_limits.cli.doctor.finding import Finding


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what is found where variables have these values, named without OTEL_EXPORTER_OTLP_."""

    def find(**variables: str) -> list[Finding]:
        for name, text in variables.items():
            monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", text)
        findings = findings_of("doctor", Context(dict(os.environ)))
        return [each for each in findings if each.name == "otlp"]

    return find


def test_without_an_endpoint_there_is_nothing_to_say(found: Any) -> None:
    """The default of opentelemetry-instrument is not ours to ask."""
    assert [each.status for each in found()] == ["-"]


@pytest.mark.parametrize("url", ["http://[", "http://:99999", "//", "http://u:hunter2@/"])
def test_an_endpoint_that_is_not_a_url_is_a_failure(found: Any, url: str) -> None:
    """Without a traceback, and without what it may hold."""
    findings = found(ENDPOINT=url)
    assert {each.status for each in findings} == {"FAIL"}
    assert "hunter2" not in str(findings)


# --- a configuration in a file --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["OTEL_CONFIG_FILE", "OTEL_EXPERIMENTAL_CONFIG_FILE"])
def test_exporters_of_a_file_are_said_to_be_untested(
    found: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its text is a program of OpenTelemetry's, so it is not read."""
    monkeypatch.setenv(name, "otel.yaml")
    (finding,) = found()
    sentence = f"The exporters in the file of {name} are not tested."
    assert (finding.status, finding.text) == ("-", sentence)


@pytest.mark.parametrize("name", ["OTEL_CONFIG_FILE", "OTEL_EXPERIMENTAL_CONFIG_FILE"])
def test_the_runaway_gets_no_file(name: str, tmp_path: Path) -> None:
    """Its exporters could lead to a real collector."""
    assert name not in sandboxed({name: "otel.yaml"}, tmp_path, "http://sink")
