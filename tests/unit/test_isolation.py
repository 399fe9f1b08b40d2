"""Which commands `otel-limits run` refuses, because their Python would not load it from outside."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest

from otel_limits.cli.isolation import FREEZERS, isolation_problem


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


def test_self_naming_script_ends_the_search(script: str) -> None:
    """The system reports the error itself."""
    Path(script).write_text(f"#!{script}\n")
    assert sentence(script) == ""


def test_an_unpacked_pex_is_one_too(tmp_path: Path) -> None:
    """It is a directory with PEX-INFO in it."""
    (tmp_path / "PEX-INFO").write_text("{}")
    assert "is a PEX" in sentence("python", str(tmp_path))


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
