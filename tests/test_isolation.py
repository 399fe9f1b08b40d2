"""Which commands `otel-limits run` refuses, because their Python would not load it from outside."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest

from otel_limits.cli.isolation import FREEZERS, isolation_problem
from tests.launching import RUN, execute

PROGRAM = "print('ran')"


def sentence(*command: str) -> str:
    """Say what is said of a command; nothing when it is started."""
    return isolation_problem(command, {"PATH": os.environ["PATH"]}) or ""


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
    ("command", "reason"),
    [
        ("env -i python app.py", "env -i would remove all limits."),
        ("env - python app.py", "env -i would remove all limits."),
        ("env -u PYTHONPATH python app.py", "env would replace PYTHONPATH"),
        ("env --unset=PYTHONPATH python app.py", "env would replace PYTHONPATH"),
        ("env PYTHONPATH=/app nice python app.py", "env would replace PYTHONPATH"),
        ("env -i ls", None),
        ("env PYTHONPATH=/app ls", None),
        ("env OTHER_PYTHONPATH=/app python app.py", None),
    ],
)
def test_env_that_takes_us_away_from_a_python_is_refused(command: str, reason: str | None) -> None:
    """A command other than Python may lose its environment."""
    assert sentence(*command.split()).startswith(reason or "")
    assert (reason is None) == (sentence(*command.split()) == "")


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


def test_self_naming_script_ends_the_search(script: str) -> None:
    """The system reports the error itself."""
    Path(script).write_text(f"#!{script}\n")
    assert sentence(script) == ""


@pytest.mark.parametrize("front", [(), (sys.executable,), ("env", "nice"), (sys.executable, "-u")])
def test_a_pex_is_refused_with_the_way_that_works(pex: Path, front: tuple[str, ...]) -> None:
    """However it is started: its Python would run without any limit."""
    ended = execute(*RUN, "--", *front, str(pex))
    assert (ended.status, ended.output) == (2, "")
    assert "is a PEX" in ended.log
    assert "call otel_limits.enable() in its code" in ended.log


def test_an_unpacked_pex_is_one_too(tmp_path: Path) -> None:
    """It is a directory with PEX-INFO in it."""
    (tmp_path / "PEX-INFO").write_text("{}")
    assert "is a PEX" in sentence("python", str(tmp_path))


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


def test_program_of_cx_freeze_is_refused(script: str) -> None:
    """Its executable has no sign, but an archive next to it contains the program."""
    Path(script).write_bytes(b"\x7fELF loader")
    archive = Path(script).parent / "lib" / "library.zip"
    archive.parent.mkdir()
    for module, is_frozen in (("json/__init__.pyc", False), ("__main__app.pyc", True)):
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr(module, "")
        assert ("is a cx_Freeze program" in sentence(script)) is is_frozen


def test_script_that_contains_a_sign_is_not_refused(script: str) -> None:
    """The source of a tool contains its own sign."""
    Path(script).write_bytes(f"#!{sys.executable}\n".encode() + FREEZERS["Nuitka"][0])
    assert sentence(script) == ""
