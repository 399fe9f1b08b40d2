"""The command line as a program: terminals, pipes, and what it imports."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from otel_limits import docs
from tests.processes import PATIENCE_SECONDS, bounded
from tests.unit.cli.test_command import ESCAPE

COMMAND = str(Path(sys.executable).with_name("otel-limits"))


def test_a_value_that_is_no_text_is_shown_escaped() -> None:
    """Bytes in a variable don't end us with a traceback."""
    environment = {**os.environb, b"OTEL_LIMITS_PROMETHEUS_HOST": b"host-\xff"}
    done = subprocess.run(
        [COMMAND, "check"],
        env=environment,
        capture_output=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0
    assert b"host-\\udcff" in done.stdout


def on_terminal(*command: str, columns: int = 100, **variables: str) -> str:
    """Run a command on a new terminal and return its output."""
    main_end, terminal = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color", **variables}
    environment.pop("NO_COLOR", None)
    with (
        subprocess.Popen(command, env=environment, stdin=terminal, stdout=terminal) as process,
        bounded(process),
    ):
        os.close(terminal)
        chunks = []
        try:
            while chunk := os.read(main_end, 65_536):
                chunks.append(chunk)
        except OSError:  # how Linux says that the other end is closed
            pass
    os.close(main_end)
    return b"".join(chunks).decode()


def test_settings_on_a_terminal_are_a_table() -> None:
    """With colours, headings, and no line longer than the terminal."""
    shown = on_terminal(COMMAND, "check", OTEL_LIMITS_PROMETHEUS_HOST="h" * 150)
    plain = re.sub(ESCAPE + r"\[[0-9;]*m", "", shown)
    assert ESCAPE in shown
    assert plain.split()[:3] == ["Setting", "Value", "From"]
    assert max(len(line.rstrip()) for line in plain.splitlines()) <= 100
    assert plain.count("h" * 20) > 1
    assert sum(line.count("h") for line in plain.splitlines() if "hhh" in line) >= 150


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """`otel-limits check | head -0` ends without a traceback."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [COMMAND, "check"],
        stdout=write_end,
        stderr=subprocess.PIPE,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["docs"]])
def test_strands_is_not_imported_to_answer_a_question(arguments: list[str]) -> None:
    """It takes more than a second; `check` and `doctor` have to, to look for what is used."""
    program = (
        "import sys\nfrom otel_limits.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "sys.exit('strands' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.DEVNULL,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0


@pytest.mark.parametrize("arguments", [["run", "--", "true"], ["check"]])
def test_yaml_and_pydantic_are_not_imported_without_a_policy_file(arguments: list[str]) -> None:
    """A process that only passes a command on, or shows settings, does without them."""
    program = "import sys\nfrom otel_limits.cli import main\nsys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", program, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    imported = set(re.findall(r"\| +(\w+)", done.stderr))
    assert "otel_limits" in imported
    assert not {"yaml", "pydantic"} & imported


def test_a_policy_file_loads_no_plugins_of_pydantic(tmp_path: Path) -> None:
    """Those of other packages can take longer than a command; they are for its application."""
    metadata = tmp_path / "loud-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: loud\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[pydantic]\nloud = loud:PLUGIN\n")
    (tmp_path / "loud.py").write_text(
        "class Plugin:\n    def new_schema_validator(self, *_, **__): return None, None, None\n"
        "PLUGIN = Plugin()\n"
    )
    policy = tmp_path / "limits.yaml"
    policy.write_text("quotas: {daily: {tokens: 5000, window: day}}\n")
    program = (
        "import os, sys\nfrom otel_limits.cli import main\nstatus = main(['check'])\n"
        "read = 'pydantic' in sys.modules and 'loud' not in sys.modules\n"
        "import pydantic\npydantic.create_model('Own')\n"
        "sys.exit(status or [read, 'loud' in sys.modules] != [True, True]"
        " or 'PYDANTIC_DISABLE_PLUGINS' in os.environ)"
    )
    environ = os.environ | {"PYTHONPATH": str(tmp_path), "OTEL_LIMITS_POLICY": str(policy)}
    environ.pop("PYDANTIC_DISABLE_PLUGINS", None)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environ,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_docs_on_terminal_renders_markdown() -> None:
    """Readers see colors instead of markup."""
    topic = docs.topics()[0]
    shown = on_terminal(COMMAND, "docs", topic)
    heading = docs.page(topic).splitlines()[0]
    assert ESCAPE in shown
    assert heading.lstrip("# ") in shown
    assert heading not in shown
