"""The export of dashboards and alert rules to a directory, also as objects of Kubernetes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from pathlib import Path
from textwrap import indent
from typing import Final, NamedTuple

from otel_limits.core.installing import install_command

# --- files ----------------------------------------------------------------------------------------

BROUGHT: Final = (
    "grafana",
    "prometheus",
    "kubernetes",
    "compose.yaml",
    "README.md",
    "pictures",
)
"""Exported files: everything but the code that generates the JSON."""

RUNBOOK: Final = re.compile(
    r'runbook: ("?)Section (\w+) of README\.md, which otel-limits dashboards export writes'
)
"""Where the runbook of an alert is, as text: a `runbook_url` that is not a URL would be a broken
link in Grafana and Alertmanager. --runbook makes it a `runbook_url`."""

GRAFANA: Final = "http://localhost:3000"
"""Default start of every alert's `dashboard_url`; --grafana sets the real address."""

DIGESTS: Final = ".exported.sha256"
"""Names and digests of the files as they were exported."""

PAGE: Final = re.compile(r"\[([^]]*)\]\(\.\./otel_limits/docs/([a-z-]+)\.md(?:#[a-z-]*)?\)")
PAGE_BY_NAME: Final = r"\1 (`otel-limits docs \2`)"

YAML: Final = ("prometheus/rules.yaml", "grafana/provisioning/alerting/otel-limits.yaml")
"""Files with a `runbook` and a `dashboard_url`."""


def directory() -> Path:
    """Where the files are: in the installed package, or in the checkout that it runs from.

    Raises:
        FileNotFoundError: They are in neither, so that the installation is broken.
    """
    # A wheel has them inside of the package, since only that is installed; see pyproject.toml.
    package = Path(__file__).parent.parent
    for candidate in (package / "_dashboards", package.parent / "dashboards"):
        if (candidate / "grafana").is_dir():
            return candidate
    raise FileNotFoundError(
        "The dashboards are missing from the installation of otel-limits. "
        f"Run: {install_command(option='--force-reinstall')}"
    )


class Exported(NamedTuple):
    """The files of an export, by their paths below its directory."""

    written: list[Path]
    kept: list[Path]
    """Those that differ, and are not as an earlier export wrote them."""


class InvalidFileError(ValueError):
    """A file in the directory of an export of which no object of Kubernetes can be made."""


def export(target: Path, runbook: str | None = None, grafana: str | None = None) -> Exported:
    """Write everything to `target`, also as objects of Kubernetes, but replace no edited file.

    Args:
        target: A directory, created if missing; files as an earlier export wrote them are replaced.
        runbook: Address of the runbook, which every alert then links to.
        grafana: Address of the Grafana whose panels every alert then links to.

    Raises:
        InvalidFileError: An edited file, or another dashboard, is invalid.
    """
    files = _Files(target)
    source = directory()
    try:
        # File by file: a directory of the user keeps what else is in it.
        for name in BROUGHT:
            for path in _files_below(source / name):
                files.write(path.relative_to(source), _content(path, source, runbook, grafana))
        # From the files that are there: an edited threshold is also that of Kubernetes.
        for name, text in _objects(target).items():
            files.write(Path("kubernetes", name), text.encode())
    finally:
        files.save_digests()
    return files.exported


def _content(path: Path, source: Path, runbook: str | None, grafana: str | None) -> bytes:
    """Return a file as it is exported."""
    content = path.read_bytes()
    name = path.relative_to(source).as_posix()
    if name in YAML:
        # In the text, so that the comments of the files stay.
        text = content.decode()
        if runbook is not None:
            text = RUNBOOK.sub(lambda at: f"runbook_url: {at[1]}{runbook}#{at[2].lower()}", text)
        return text.replace(GRAFANA, (grafana or GRAFANA).rstrip("/")).encode()
    if name == "README.md":
        # The pages stay in the package, where no link from this directory leads.
        return PAGE.sub(PAGE_BY_NAME, content.decode()).encode()
    return content


class _Files:
    """Files of an export. By their digests, the next one finds those that it may replace."""

    def __init__(self, target: Path) -> None:
        self.exported = Exported([], [])
        self._target = target
        self._digests: dict[str, str] = {}
        with contextlib.suppress(OSError, UnicodeDecodeError):
            for line in (target / DIGESTS).read_text(encoding="utf-8").splitlines():
                digest, _, name = line.partition("  ")
                self._digests[name] = digest

    def write(self, path: Path, content: bytes) -> None:
        """Write a file, unless it was edited."""
        name, copy = path.as_posix(), self._target / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        there = copy.read_bytes() if copy.exists() else content
        # Git for Windows changes the ends of lines: the second form is the one that was exported.
        forms = (there, there.replace(b"\r\n", b"\n"))
        digests = {_digest(form) for form in forms}
        if content not in forms and self._digests.get(name) not in digests:
            self.exported.kept.append(path)
            return
        try:
            copy.write_bytes(content)
        finally:
            if copy.exists():  # also half of it, as a full disk leaves it
                self._digests[name] = _digest(copy.read_bytes())
        self.exported.written.append(path)

    def save_digests(self) -> None:
        """Write the digests, which `sha256sum -c` reads."""
        lines = (f"{digest}  {name}\n" for name, digest in sorted(self._digests.items()))
        if self._digests:  # otherwise an error left nothing, maybe not even the directory
            (self._target / DIGESTS).write_text("".join(lines), encoding="utf-8")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _files_below(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())


# --- objects of Kubernetes ------------------------------------------------------------------------
# Text within text: the comments of the rules stay, and no YAML has to be read and written again.

RULE: Final = """\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: {name}
  labels:
    app.kubernetes.io/name: otel-limits
    # By this label kube-prometheus-stack selects what it reads: the name of your release of it.
    release: kube-prometheus-stack
spec:
{spec}"""

DASHBOARD: Final = """\
apiVersion: v1
kind: ConfigMap
metadata:
  name: otel-limits-{name}
  labels:
    app.kubernetes.io/name: otel-limits
    # Default label that the sidecar of Grafana's Helm chart watches.
    grafana_dashboard: "1"
  annotations:
    # Where the chart has sidecar.dashboards.folderAnnotation: grafana_folder
    grafana_folder: otel-limits
data:
  {name}.json: |-
    {content}
"""


def _objects(directory: Path) -> dict[str, str]:
    """Return objects made of the rules and dashboards in `directory`, by file name."""
    rules = {
        "otel-limits": directory / "prometheus/rules.yaml",
        # Apart, as a deployment replaces its numbers.
        "otel-limits-thresholds": directory / "prometheus/thresholds.yaml",
    }
    # Sorted, so that the same files come out in the same order everywhere.
    boards = sorted((directory / "grafana/dashboards").glob("*.json"))
    made = {
        "prometheusrules.yaml": [_rule(name, path) for name, path in rules.items()],
        "dashboards.yaml": [_dashboard(path) for path in boards],
    }
    return {name: "---\n".join(objects) for name, objects in made.items()}


def _rule(name: str, path: Path) -> str:
    return RULE.format(name=name, spec=indent(_text(path), "  "))


def _dashboard(path: Path) -> str:
    # On one line, without what only people need: a ConfigMap has room for 1 MiB.
    text = _text(path)
    try:
        board = json.loads(text)
    except ValueError as error:
        raise _invalid(path, f"valid JSON ({error})") from error
    content = json.dumps(board, separators=(",", ":"), ensure_ascii=False)
    return DASHBOARD.format(name=path.stem, content=content)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(path, "UTF-8") from error


def _invalid(path: Path, form: str) -> InvalidFileError:
    return InvalidFileError(
        f"{path} is not {form}, so no object of Kubernetes can be made from it. Correct it, or "
        "move it away, and export again."
    )
