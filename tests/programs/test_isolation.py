"""The Python of a command, as `otel-limits run` tests it, and the notice about other programs."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest

from otel_limits.cli.run_command import isolation_problem
from otel_limits.settings.children import environment_for_run
from tests.launching import RUN, execute

PROGRAM = "print('ran')"


@pytest.fixture
def script(tmp_path: Path) -> str:
    """Return the path of an executable whose first line a test writes."""
    path = tmp_path / "app"
    path.touch()
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def pex(tmp_path: Path) -> Path:
    """Return a PEX, as far as it differs from another zip file with a first line."""
    path = tmp_path / "app.pex"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("PEX-INFO", "{}")
        archive.writestr("__main__.py", PROGRAM)
    path.write_bytes(b"#!/usr/bin/env python3\n" + path.read_bytes())
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("options", "obstacle"),
    [
        ("", None),
        ("-X dev -W error::SyntaxWarning", None),
        ("-i", None),
        ("--version", None),
        ("-I", "-I"),
        ("-sE", "-E"),
        ("-S", "-S"),
        ("-I -S", "-S"),
        ("-X dev -I", "-I"),
        ("-Wignore -I", "-I"),
    ],
)
def test_python_is_asked_with_its_options(options: str, obstacle: str | None) -> None:
    """It knows best which of them keep it from loading otel-limits, and names the most severe."""
    environ = environment_for_run({"PATH": os.environ["PATH"]})
    problem = isolation_problem([sys.executable, *options.split(), "app.py"], environ)
    expected = f"{sys.executable} {obstacle} would ignore all limits. Start it without {obstacle}"
    assert (problem or "").startswith(expected if obstacle else "")
    assert (problem is None) is (obstacle is None)


def test_python_that_cannot_be_asked_is_started(script: str) -> None:
    """Its fault shows there."""
    python = Path(script).with_name("python3")
    Path(script).rename(python)
    python.write_text(f"#!{python}\n")
    assert isolation_problem([str(python)], {"PATH": ""}) is None


@pytest.mark.parametrize(
    ("first_line", "refused"),
    [
        (f"#!{sys.executable} -I", "-I would ignore all limits"),
        ("#!/usr/bin/env -S python3 -sE", "-E would ignore all limits"),
        ("#!/usr/bin/env -S PYTHONPATH=/app python3", "would ignore PYTHONPATH"),
        (f"#!/usr/bin/env -S -i {sys.executable}", "would ignore PYTHONPATH"),
        (f"#!{sys.executable}", ""),
        ("#!/usr/bin/env python3", ""),
    ],
)
def test_the_first_line_of_a_script_is_asked(script: str, first_line: str, refused: str) -> None:
    """It names the interpreter and its options; nothing is printed by the script."""
    Path(script).write_text(f"{first_line}\n{PROGRAM}\n")
    ended = execute(*RUN, "--", script)
    assert (ended.status, ended.output) == ((2, "") if refused else (0, "ran\n"))
    assert refused in ended.log


@pytest.mark.parametrize("front", [(), (sys.executable,), (sys.executable, "-u")])
def test_a_pex_is_refused_with_the_way_that_works(pex: Path, front: tuple[str, ...]) -> None:
    """However it is started: its Python would run without any limit."""
    ended = execute(*RUN, "--", *front, str(pex))
    assert (ended.status, ended.output) == (2, "")
    assert "is a PEX" in ended.log
    assert "call otel_limits.enable() in its code" in ended.log


def test_another_zip_file_is_not_a_pex(tmp_path: Path) -> None:
    """A zipapp has no bootstrap that isolates it."""
    path = tmp_path / "app.pyz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("__main__.py", PROGRAM)
    ended = execute(*RUN, "--", sys.executable, str(path))
    assert (ended.status, ended.output) == (0, "ran\n")


# --- other programs -------------------------------------------------------------------------------

NOTICE = "{} is not a Python program. Limits apply in the Python processes that it starts"


@pytest.mark.parametrize("front", [("env", "A=1"), ("nice", "-n", "0"), ("sh", "-c", '"$@"', "sh")])
def test_other_program_is_started_after_a_notice(front: tuple[str, ...]) -> None:
    """One line, with the command that verifies limits; QUIET and DISABLED suppress it."""
    command = (*RUN, "--", *front, sys.executable, "-c", PROGRAM)
    noted = execute(*command, OTEL_LIMITS_QUIET="false")
    first = noted.log.splitlines()[0]
    assert (noted.status, noted.output) == (0, "ran\n")
    assert first.startswith(f"otel-limits: {NOTICE.format(front[0])}")
    assert first.endswith("otel-limits doctor -- otel-limits run -- THE PYTHON IT ENDS IN")
    for variable in ("OTEL_LIMITS_QUIET", "OTEL_LIMITS_DISABLED"):
        silent = execute(*command, **{"OTEL_LIMITS_QUIET": "false", variable: "true"})
        assert (silent.output, silent.log) == ("ran\n", "")


def test_strict_refuses_other_programs() -> None:
    """It promises that no agent runs without limits, which cannot be seen here."""
    command = ("nice", sys.executable, "-c", PROGRAM)
    refused = execute(*RUN, "--strict", "--", *command)
    assert (refused.status, refused.output) == (2, "")
    assert "nice is not a Python program, so limits may not apply" in refused.log
    assert "Start that Python with otel-limits run" in refused.log
    inside = execute("nice", *RUN, "--strict", "--", *command[1:])
    assert (inside.status, inside.output) == (0, "ran\n")
    disabled = execute(*RUN, "--strict", "--", *command, OTEL_LIMITS_DISABLED="true")
    assert disabled.output == "ran\n"


def test_notice_does_not_show_arguments(script: str) -> None:
    """A name may be a URL by mistake, and arguments contain secrets."""
    Path(script).write_text("#!/bin/sh\n")
    noted = execute(*RUN, "--", script, "--password=s3cret", OTEL_LIMITS_QUIET="false")
    assert "s3cret" not in noted.log
