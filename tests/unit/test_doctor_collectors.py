"""What `otel-limits doctor` says of the OTLP endpoints that are configured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from otel_limits.cli.doctor.collector import examine_collectors
from otel_limits.settings.otel_config import harmless_copy

if TYPE_CHECKING:
    from otel_limits.cli.doctor.finding import Finding


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what is found where variables have these values, named without OTEL_EXPORTER_OTLP_."""

    def find(**variables: str) -> list[Finding]:
        for name, text in variables.items():
            monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", text)
        return list(examine_collectors(dict(os.environ)))

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


def declaring(exporter: str) -> str:
    """Return a configuration with one exporter of spans, and one that is none of OTLP."""
    return f"""\
file_format: "1.0"
tracer_provider:
  processors:
    - batch: {{exporter: {exporter}}}
    - simple: {{exporter: {{console: }}}}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that OTEL_CONFIG_FILE names."""
    path = tmp_path / "otel.yaml"
    monkeypatch.setenv("OTEL_CONFIG_FILE", str(path))
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "cannot be read: No such file"), ("a: [", "is not valid YAML."), ("a: b", "")],
)
def test_a_file_without_exporters(found: Any, file: Path, text: str | None, said: str) -> None:
    """An unreadable file is a failure."""
    if text is not None:
        file.write_text(text)
    findings = found()
    assert [each.status for each in findings] == (["FAIL"] if said else [])
    assert said in str(findings)


def test_the_runaway_gets_a_copy_that_leads_nowhere(file: Path, tmp_path: Path) -> None:
    """Every exporter is there, and each sends to the doctor, without any header."""
    file.write_text(
        declaring("{otlp_http: {endpoint: http://real, headers_list: api-key=hunter2}}")
        + "meter_provider: {readers: [{periodic: {exporter: {otlp_grpc: }}}]}\n"
    )
    made = harmless_copy(dict(os.environ), tmp_path, "http://sink")
    copy = Path(made["OTEL_CONFIG_FILE"]).read_text()
    assert "real" not in copy
    assert "hunter2" not in copy
    (batch, simple) = yaml.safe_load(copy)["tracer_provider"]["processors"]
    assert batch == {"batch": {"exporter": {"otlp_http": {"endpoint": "http://sink"}}}}
    assert simple == {"simple": {"exporter": {"console": None}}}
    assert copy.count("http://sink") == 2
