"""The line that loads otel-limits automatically in every Python process of an environment.

It is in a file that Python reads at startup, in the environment's `purelib`: a `.pth` file
(<https://docs.python.org/3/library/site.html>), or from Python 3.15 a `.start` file, which names a
function instead of containing code (<https://peps.python.org/pep-0829/>). Only the command
`otel-limits autoload install` writes it.
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
    # One line, because Python runs a .pth file line by line, and plain, because scanners look for
    # hidden code there. A virtual environment's files run twice, hence the marker module.
    'import os, sys; any(name.startswith("OTEL_LIM") for name in os.environ) and '
    f'"{NAME}" not in sys.modules and '
    '(__import__("otel_limits_startup").autoload() '
    'if __import__("importlib.util").util.find_spec("otel_limits_startup") '
    f"else sys.modules.update({NAME}=None) or "
    'sys.stderr.write("otel-limits: limits are not enforced: it is no longer installed here. '
    f'Install it, or delete {NAME}.pth in " + sys.prefix + ".\\n"))\n'
)
"""Does nothing if no variable is set, and reports that the package has been uninstalled."""

START: Final = "otel_limits_startup:autoload\n"

ASK_SECONDS: Final = 20
"""How long a Python process may take to show whether it autoloads."""

IS_WAITING: Final = "import sys; sys.exit('otel_limits_startup' not in sys.modules)"


class AutoloadError(Exception):
    """The line cannot be installed or removed. The message explains why and what to do."""


def autoload_file() -> Path:
    """Return the path of the file with the line, whether it exists or not."""
    # From sysconfig, because the files of an editable install are elsewhere.
    return Path(sysconfig.get_path("purelib"), NAME + (".start" if HAS_START_FILES else ".pth"))


def installed_autoload() -> Path | None:
    """Return the file with the line, or `None` if it is not installed."""
    path = autoload_file()
    return path if path.is_file() else None


def is_current(path: Path) -> bool:
    """Return whether the line is the one that this version writes."""
    return path.read_text(encoding="utf-8") == _text()


def install_autoload(environ: Mapping[str, str]) -> Path:
    """Write the line into this Python's environment, and test it.

    Args:
        environ: The environment variables of the test.

    Raises:
        AutoloadError: It cannot be written, or has no effect.
    """
    path = autoload_file()
    _require_own_environment()
    if not _succeeds([sys.executable, "-I", "-c", "import otel_limits_startup"], environ):
        raise AutoloadError(
            "otel-limits is not installed in this environment, but for this user or on "
            "PYTHONPATH, which python -I ignores. Install it into a virtual environment."
        )
    try:
        _write(path, _text())
    except OSError as error:
        raise AutoloadError(
            f"{path} cannot be written: {error.strerror}. Run this when creating the environment, "
            "e.g. in the build of the image."
        ) from None
    if not autoloads([sys.executable, "-I"], environ):
        remove_autoload()
        raise AutoloadError(
            f"{sys.executable} does not read {path.parent} at startup. Install "
            "otel-limits into a virtual environment."
        )
    return path


def remove_autoload() -> Path | None:
    """Delete the line; return its file, or `None` if it was not installed.

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
    """Return whether a Python command loads otel-limits automatically."""
    # Any variable would do; this value is the default.
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
    """Reject environments managed by a distribution (<https://peps.python.org/pep-0668/>).

    Raises:
        AutoloadError: It is managed.
    """
    stdlib = sysconfig.get_path("stdlib", sysconfig.get_default_scheme())
    if sys.prefix == sys.base_prefix and Path(stdlib, "EXTERNALLY-MANAGED").exists():
        raise AutoloadError(
            f"The environment of {sys.executable} is managed by the operating system (PEP 668). "
            "Install otel-limits into a virtual environment, and use autoload there."
        )


def _text() -> str:
    return START if HAS_START_FILES else PTH


def _write(path: Path, text: str) -> None:
    """Replace the file atomically: another Python may start at any moment."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
