"""The line that switches otel-limits on in every Python of an environment that has a limit set.

It stands in a file that Python reads when it starts, in the environment's `purelib`: a `.pth` file
(<https://docs.python.org/3/library/site.html>), and from Python 3.15 on a `.start` file, which
names a function instead of holding code (<https://peps.python.org/pep-0829/>). Nobody writes it but
the command `otel-limits autoload install`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

NAME: Final = "otel_limits_autoload"

HAS_START_FILES: Final = sys.version_info >= (3, 15)

PTH: Final = (
    # One line, because Python runs a .pth file line by line; and plain, because scanners look for
    # hidden code there. A virtual environment's files are run twice, hence the mark.
    'import os, sys; any(name.startswith("OTEL_LIM") for name in os.environ) and '
    f'"{NAME}" not in sys.modules and '
    '(__import__("otel_limits_startup").autoload() '
    'if __import__("importlib.util").util.find_spec("otel_limits_startup") '
    f"else sys.modules.update({NAME}=None) or "
    'sys.stderr.write("otel-limits: it is not installed here any more, so no limit is in force. '
    f'Install it, or delete {NAME}.pth in " + sys.prefix + ".\\n"))\n'
)
"""Does nothing where nothing is set; says so where the package has been uninstalled."""

START: Final = "otel_limits_startup:autoload\n"

ASK_SECONDS: Final = 20
"""How long a Python may take to say whether it autoloads."""

IS_WAITING: Final = "import sys; sys.exit('otel_limits_startup' not in sys.modules)"


class AutoloadError(Exception):
    """The line cannot be installed or removed; a sentence that says why and what to do."""


def autoload_file() -> Path:
    """Return where the line of this Python's environment stands, whether it is there or not."""
    # From sysconfig: an editable install has its own files somewhere else.
    return Path(sysconfig.get_path("purelib"), NAME + (".start" if HAS_START_FILES else ".pth"))


def installed_autoload() -> Path | None:
    """Return the file with the line, or `None` where this Python's environment has none."""
    path = autoload_file()
    return path if path.is_file() else None


def is_current(path: Path) -> bool:
    """Tell whether the line is the one that this version writes."""
    return path.read_text(encoding="utf-8") == _text()


def install_autoload(environ: Mapping[str, str]) -> Path:
    """Write the line into this Python's environment, and see that Python heeds it.

    Args:
        environ: The variables that a Python is started with to see that.

    Raises:
        AutoloadError: It cannot be written, or would not be heeded.
    """
    path = autoload_file()
    _require_own_environment()
    if not _succeeds([sys.executable, "-I", "-c", "import otel_limits_startup"], environ):
        raise AutoloadError(
            "otel-limits is not installed in this environment itself, but for this user or on "
            "PYTHONPATH, which python -I ignores. Install it into a virtual environment."
        )
    try:
        _write(path, _text())
    except OSError as error:
        raise AutoloadError(
            f"{path} cannot be written: {error.strerror}. Do this where the environment is made, "
            "such as in the build of the image."
        ) from None
    if not autoloads([sys.executable, "-I"], environ):
        remove_autoload()
        raise AutoloadError(
            f"{sys.executable} does not read the files of {path.parent} when it starts. Install "
            "otel-limits into a virtual environment."
        )
    return path


def remove_autoload() -> Path | None:
    """Delete the line; return the file that held it, or `None` where there was none.

    Raises:
        AutoloadError: It cannot be deleted.
    """
    path = autoload_file()
    try:
        path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AutoloadError(f"{path} cannot be deleted: {error.strerror}.") from None
    return path


def autoloads(python: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Ask a Python, given with its options, whether it would load otel-limits by itself."""
    # Any variable of ours will do; this one says what is so anyhow.
    return _succeeds([*python, "-c", IS_WAITING], {**environ, "OTEL_LIMITS_STRICT": "false"})


def _succeeds(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    try:
        done = subprocess.run(  # noqa: S603  this Python, or the user's own command
            command,
            env=environ,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=ASK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def _require_own_environment() -> None:
    """Leave an environment alone that a distribution manages (<https://peps.python.org/pep-0668/>).

    Raises:
        AutoloadError: It is such a one.
    """
    stdlib = sysconfig.get_path("stdlib", sysconfig.get_default_scheme())
    if sys.prefix == sys.base_prefix and Path(stdlib, "EXTERNALLY-MANAGED").exists():
        raise AutoloadError(
            f"The environment of {sys.executable} is managed by the operating system (PEP 668). "
            "Install otel-limits into a virtual environment, and autoload it there."
        )


def _text() -> str:
    return START if HAS_START_FILES else PTH


def _write(path: Path, text: str) -> None:
    """Put the file in place as a whole: another Python may start at any moment."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
