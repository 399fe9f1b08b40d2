"""The files that load otel-limits automatically in every Python process of an environment.

They are in the environment's `purelib`: a `.pth` file that Python reads at startup
(<https://docs.python.org/3/library/site.html>), or from Python 3.15 a `.start` file, which names a
function instead of containing code (<https://peps.python.org/pep-0829/>); the module that it
imports; and settings, if any are kept. Only the command `otel-limits autoload install` writes them.

The module is a copy, so it outlives the package: after an incomplete uninstallation it still
reports that agents are not limited.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib.util import cache_from_source
from pathlib import Path
from typing import Final

from otel_limits.bindings.entry_points import EntryPoint, entry_points_of, installed_entry_points
from otel_limits.startup import otel_limits_startup

NAME: Final = "otel_limits_autoload"

MODULE: Final = Path(otel_limits_startup.__file__)
"""The module that is copied."""

FOUND: Final = '\nFOUND = "{}"\n'
"""Its line with the frameworks of other distributions."""

RENEW: Final = "Run: otel-limits autoload install"
OUTDATED: Final = "{path} is outdated: {reason}."

# One line, because Python runs a .pth file line by line, and plain, because scanners look for
# hidden code there.
PTH_WITH_SETTINGS: Final = f"import {MODULE.stem}; {MODULE.stem}.autoload()\n"
PTH: Final = (
    'import os; any(name.startswith("OTEL_LIM") for name in os.environ) and '
    f'__import__("{MODULE.stem}").autoload()\n'
)
"""Does nothing if no variable is set."""

START: Final = f"{MODULE.stem}:autoload\n"

ASK_SECONDS: Final = 20
"""How long a Python process may take to show whether it autoloads."""

IS_WAITING: Final = f"import sys; sys.exit('{MODULE.stem}' not in sys.modules)"


class AutoloadError(Exception):
    """The line cannot be installed or removed. The message explains why and what to do."""


def _has_start_files() -> bool:
    return sys.version_info >= (3, 15)


def autoload_file() -> Path:
    """Return the path of the file with the line, whether it exists or not."""
    # From sysconfig, because the files of an editable install are elsewhere.
    return Path(sysconfig.get_path("purelib"), NAME + (".start" if _has_start_files() else ".pth"))


def installed_autoload() -> Path | None:
    """Return the file with the line, or `None` if it is not installed."""
    path = autoload_file()
    return path if path.is_file() else None


def kept_settings() -> dict[str, str]:
    """Return the settings that are kept next to the line, by variable."""
    return otel_limits_startup.kept_settings(str(_settings_file()))


def outdated_autoload() -> str | None:
    """Return why other files would be written now, if any are installed, and else `None`."""
    path = installed_autoload()
    if path is None or all(
        file.is_file() and file.read_text(encoding="utf-8") == text
        for file, text in _files(kept_settings())
    ):
        return None
    with contextlib.suppress(OSError):
        copy = path.with_name(MODULE.name).read_text(encoding="utf-8")
        was, now = (
            {each.distribution for each in points}
            for points in (_entry_points(copy), installed_entry_points().entry_points)
        )
        reasons = [f"{name} was installed since" for name in sorted(now - was)]
        reasons += [f"{name} was uninstalled since" for name in sorted(was - now)]
        if reasons:
            return ", ".join(reasons)
    return "its files are not those of this version"


def _entry_points(module: str) -> tuple[EntryPoint, ...]:
    """Return the frameworks of other distributions that a copy of the module lists."""
    before, after = FOUND.split("{}")
    return entry_points_of(module.partition(before)[2].partition(after)[0])


def install_autoload(environ: Mapping[str, str], settings: Mapping[str, str]) -> Path:
    """Write the files into this Python's environment, and test them.

    Args:
        environ: The environment variables of the test.
        settings: The settings to keep, by variable. If there are none, those of an earlier
            installation are kept.

    Raises:
        AutoloadError: They cannot be written, or have no effect.
    """
    path = autoload_file()
    _require_own_environment()
    if not _succeeds([sys.executable, "-I", "-c", "import otel_limits"], environ):
        raise AutoloadError(
            "otel-limits is only installed for this user or on PYTHONPATH, which python -I "
            "ignores. Install it into a virtual environment."
        )
    try:
        for file, text in _files(settings or kept_settings()):
            _write(file, text)
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
    """Delete the files; return the one with the line, or `None` if it was not installed.

    Raises:
        AutoloadError: One of them cannot be deleted.
    """
    path = autoload_file()
    found = installed_autoload()
    try:
        # The line first, as it needs the module.
        module = path.with_name(MODULE.name)
        for file in (path, _settings_file(), module, Path(cache_from_source(str(module)))):
            file.unlink(missing_ok=True)
    except OSError as error:
        raise AutoloadError(f"{path} cannot be deleted: {error.strerror}.") from None
    return found


def _settings_file() -> Path:
    return autoload_file().with_name(otel_limits_startup.SETTINGS)


def _files(settings: Mapping[str, str]) -> list[tuple[Path, str]]:
    """Return the files to write, in this order, with their contents."""
    line = PTH_WITH_SETTINGS if settings else PTH
    path = autoload_file()
    kept = "".join(f"{name}={value}\n" for name, value in settings.items())
    found = installed_entry_points().text
    module = MODULE.read_text(encoding="utf-8").replace(FOUND.format(""), FOUND.format(found))
    return [
        (path.with_name(MODULE.name), module),
        *([(_settings_file(), kept)] if settings else ()),
        (path, START if _has_start_files() else line),
    ]


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


def _write(path: Path, text: str) -> None:
    """Replace the file atomically: another Python may start at any moment."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.chmod(0o644)  # for all users of the environment, like its other modules
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
