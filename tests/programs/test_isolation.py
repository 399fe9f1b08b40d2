"""The Python, script or archive that a command starts, as `otel-limits run` examines it."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from otel_limits.cli.isolation import FREEZERS
from tests.launching import RUN, execute
from tests.unit.test_isolation import sentence

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
    ("command", "option"),
    [
        ("python app.py", None),
        ("python -I app.py", "-I"),
        ("/usr/bin/python3.12 -uE app.py", "-E"),
        ("python -S -m app", "-S"),
        ("python -X dev -W error::SyntaxWarning app.py", None),
        ("python -Xdev -WError app.py", None),
        ("python -X dev -I app.py", "-I"),
        ("python -Im app", "-I"),
        ("python -c print() -I", None),
        ("python -um app -S", None),
        ("python - -I", None),
        ("python --check-hash-based-pycs always -I app.py", "-I"),
        ("python -I -S app.py", "-S"),
        ("python", None),
        ("pypy3 -E app.py", "-E"),
        ("uvicorn -I app:app", None),
        ("xargs -n 1 python -I", "-I"),
        ("env python -I app.py", "-I"),
        ("/usr/bin/env -u HOME A=1 python -E app.py", "-E"),
        ("env -S python -I app.py", "-I"),
        ("env --chdir /tmp nice -n 5 python -I app.py", "-I"),
        ("timeout -s KILL 10 python -sE app.py", "-E"),
        ("flock /tmp/lock tini -- python -I app.py", "-I"),
        ("opentelemetry-instrument --traces_exporter none python -E app.py", "-E"),
        ("env A=-I python app.py", None),
        ("env", None),
        ("nice -n 5", None),
    ],
)
def test_the_option_with_which_python_ignores_us_is_found(command: str, option: str | None) -> None:
    """Interpreter options are distinguished from their arguments and the program's options."""
    said = sentence(*command.split())
    assert said.partition(" would ")[0].rpartition(" ")[2] == (option or "")
    assert (option is None) == (said == "")


@pytest.mark.parametrize(
    ("first_line", "is_refused"),
    [
        (f"#!{sys.executable} -I", True),
        ("#!/usr/bin/env -S python3 -sE", True),
        (f"#!{sys.executable}", False),
        ("#!/bin/sh", False),
        ("", False),
    ],
)
def test_the_first_line_of_a_script_is_read(
    script: str, first_line: str, *, is_refused: bool
) -> None:
    """It names the interpreter and its options; nothing is printed by the script."""
    Path(script).write_text(f"{first_line}\n{PROGRAM if 'python' in first_line else ''}\n")
    ended = execute(*RUN, "--", script)
    assert (ended.status == 2) is is_refused
    assert ("would ignore all limits" in ended.log) is is_refused


@pytest.mark.parametrize("front", [(), (sys.executable,), ("env", "nice"), (sys.executable, "-u")])
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


@pytest.mark.parametrize(
    ("freezer", "content"),
    [
        # The archive follows the loader, and a signature may follow both.
        ("PyInstaller", FREEZERS["PyInstaller"][0] + b"archive" + b"\0" * 4096),
        *(("Nuitka", sign) for sign in FREEZERS["Nuitka"]),
    ],
)
def test_frozen_program_is_refused_with_the_way_that_works(
    script: str, freezer: str, content: bytes
) -> None:
    """Its own Python ignores PYTHONPATH."""
    Path(script).write_bytes(b"\x7fELF loader" + content)
    for front in ((), ("env", "nice")):
        ended = execute(*RUN, "--", *front, script)
        assert (ended.status, ended.output) == (2, "")
        assert f"is a {freezer} program, which ignores PYTHONPATH" in ended.log
        assert "call otel_limits.enable() in its code" in ended.log
