"""The policy file on disk: reloaded when it changes, and who may change it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from otel_limits.core.comparisons import NOT_COMPARABLE
from otel_limits.core.errors import ConfigurationError
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.policy import Policy
from otel_limits.core.secrets import redact_value
from otel_limits.runs.clock import CLOCK
from otel_limits.settings.policy.document import NO_DOCUMENT, Document
from otel_limits.settings.policy.loosening import loosened
from otel_limits.settings.settings_reader import settings_with
from otel_limits.settings.variables import set_variable, variable

if TYPE_CHECKING:
    from otel_limits.core.policy import Overrides


# --- the file, reloaded for new invocations when it changes ---------------------------------------

logger = logging.getLogger("otel_limits")

LOOK_INTERVAL_SECONDS: Final = 1.0
"""Minimum time between two checks for changes."""

MAX_BYTES: Final = 1_000_000
"""The file is read in the thread of an agent; this much takes seconds."""

PLUGINS: Final = "PYDANTIC_DISABLE_PLUGINS"
"""The variable of pydantic with the plugins not to load: https://docs.pydantic.dev/latest/concepts/plugins."""

NO_POLICY: Final = Policy()

UNUSED: Final = "The policy file contains mistakes and was not used: otel-limits check lists them."

NONBLOCK: Final = getattr(os, "O_NONBLOCK", 0)
"""Windows has neither this flag nor FIFOs."""


@dataclass(frozen=True, slots=True)
class FileVersion:
    """A version of the file, as the file system describes it."""

    digest: str = ""
    """SHA-256, in hexadecimal digits; empty if it could not be read."""
    owner: str = ""
    modified: float | None = None
    """In seconds since the epoch."""


NO_VERSION: Final = FileVersion()

Stamp: TypeAlias = "tuple[int, ...] | None"
"""Modification times, size and inode of the file; `None` if it does not exist."""


class PolicyFile:
    """The policy file of a process.

    Attributes:
        path: Its path, if there is one.
        document: The latest valid version.
        mistakes: The mistakes in the latest version.
        version: The latest version, valid or not.
    """

    def __init__(self, path: str | None = None, clock: Callable[[], float] = CLOCK.now) -> None:
        """Read the file, if there is one."""
        self.path = path
        self._shown = redact_value(path or "")
        self._clock = clock
        self._lock = threading.Lock()
        self._next_look = clock() + LOOK_INTERVAL_SECONDS
        self._stamp: Stamp = None
        self._content: bytes | None = None
        # Never modified, only replaced, because invocations read it without a lock.
        self.document: Document = NO_DOCUMENT
        self.mistakes: tuple[str, ...] = ()
        self.version = NO_VERSION
        if path is not None:
            # Before reading, so that a change in between is found by the next check.
            self._stamp = _stamp(path)
            self._read(path)

    @suppress_errors("policy")
    def refresh(self, base: Policy = NO_POLICY) -> None:
        """Reload the file if it has changed. If it is invalid, the previous version is kept.

        A new version that loosens a limit is logged as a warning: a tool of an agent may have
        written it.

        Called at the start of an invocation. Checks at most once a second; other threads use the
        current version during the check.
        """
        path = self.path
        # Before the lock, because every invocation calls this.
        if path is None or self._clock() < self._next_look:
            return
        # Other threads don't wait and use the current version.
        if self._lock.acquire(blocking=False):
            before = self.document
            try:
                is_new = self._look(path)
            finally:
                self._lock.release()
            # Without the lock, because it logs and publishes.
            if is_new:
                self.announce(loosened(before, self.document, base))

    def announce(self, looser: tuple[str, ...] | None = None) -> None:
        """Log and publish whether the latest version was accepted, and what it loosens.

        `None` for the first version, which is compared with none.

        Also whether agents can change the file. The usual case, that its own user can, is left to
        the line about the first call, so that developers are not warned at every start.
        """
        if self.path is None:
            return
        # Not needed by commands, which read a file and publish nothing.
        from otel_limits.core.events import PolicyRead
        from otel_limits.runs.registry import LIVE

        changeable = is_changeable(self.path)
        LIVE.observers.publish(
            PolicyRead(
                path=self._shown,
                valid=not self.mistakes,
                loosened=looser or (),
                changeable=changeable,
                agents=tuple(self.document.agents),
                reloaded=looser is not None,
                digest=self.version.digest,
                owner=self.version.owner,
                modified=self.version.modified,
            )
        )
        if changeable and is_shared(self.path):
            _warn_about_access(self._shown)
        for each in looser or ():
            verb = "may loosen" if each.endswith(NOT_COMPARABLE) else "loosens"
            logger.warning(
                "otel-limits: policy file %s %s a limit for %s.", self._shown, verb, each
            )
        if not self.mistakes:
            logger.info("otel-limits: policy file %s accepted.", self._shown)
            return
        LIVE.observers.publish_internal_error("policy")
        consequence = (
            "The policy file is ignored; all other settings apply."
            if self.document is NO_DOCUMENT
            else "The previous version still applies."
        )
        for mistake in self.mistakes:
            logger.error("otel-limits: %s %s", mistake, consequence)

    def after_fork(self) -> None:
        """Read again in a child what a thread of the parent was reading, which is not there."""
        if self._lock.locked():
            self._stamp = self._content = None
        self._lock = threading.Lock()

    def _look(self, path: str) -> bool:
        """Read the file if it has changed; return whether its content has."""
        self._next_look = self._clock() + LOOK_INTERVAL_SECONDS
        stamp = _stamp(path)
        if stamp == self._stamp:
            return False
        # Before reading, so that a change during it is found by the next check.
        self._stamp = stamp
        return self._read(path)

    def _read(self, path: str) -> bool:
        try:
            content, version = _content(path)
        except (OSError, ValueError) as error:
            # Reset, so that the same content counts as new when the file is readable again.
            self._content, self.version = None, NO_VERSION
            reason = getattr(error, "strerror", None) or error
            self.mistakes = (f"{self._shown} cannot be read: {reason}.",)
            return True
        # A `touch`, or a deployment that rewrites every file, changes nothing.
        if content == self._content:
            return False
        # Also kept if it is invalid, so that mistakes are logged once.
        self._content, self.version = content, version
        document, self.mistakes = _parse(content, self._shown)
        # Otherwise the previous version still applies: a deployment must not remove limits.
        if not self.mistakes:
            self.document = document
        return True


@functools.cache
def _warn_about_access(path: str) -> None:
    """Report once that agents can change a file of another user, or that all users can."""
    logger.warning("otel-limits: %s", CHANGEABLE.format(path=path))


NO_FILE: Final = PolicyFile()
"""Used if there is no policy file."""


def valid_document(path: str | None = None) -> Document:
    """Return the content of a policy file, by default of that of this process, for a command.

    Raises:
        ConfigurationError: It, or the variable with its path, contains mistakes.
    """
    policy_file = PolicyFile(path or settings_with("policy").policy_path)
    if policy_file.mistakes:
        raise ConfigurationError(policy_file.mistakes)
    return policy_file.document


def usable_document() -> tuple[Document, str]:
    """Return the content of the policy file of this process, for a command that can do without it.

    If it contains mistakes, nothing and a sentence about them.
    """
    try:
        return valid_document(), ""
    except ConfigurationError:
        return NO_DOCUMENT, UNUSED


def price_mistakes(policy: Policy | Overrides, document: Document) -> list[str]:
    """Report a cost limit set outside the policy file if prices are not available."""
    caps = (policy.limits, policy.tree, policy.conversation)
    capped = any(each.max_cost_usd is not None for each in caps)
    if not capped:
        return []
    # Most programs have no such limit, and `otel-limits run` only looks for mistakes.
    from otel_limits.core.price_lookup import Prices, missing_prices

    if Prices(document.price_list()).available:
        return []
    return [f"max_cost_usd {missing_prices()}"]


def policy_mistakes(policy: Policy, policy_file: PolicyFile) -> list[str]:
    """Return the mistakes of the policy file, and of the environment in combination with it."""
    return [*policy_file.mistakes, *price_mistakes(policy, policy_file.document)]


def _content(path: str) -> tuple[bytes, FileVersion]:
    """Read the file and describe it, without blocking and up to a maximum size.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not a regular file, or too long.
    """
    # Non-blocking, because opening a FIFO would block the agent until something writes to it.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        # One more than the maximum, because the reported size may be outdated.
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"it is longer than {MAX_BYTES:,} bytes")
    digest = hashlib.sha256(content).hexdigest()
    return content, FileVersion(digest, _user_name(status.st_uid), status.st_mtime)


def _user_name(uid: int) -> str:
    """Return the name of a user, or the number of one without a name, e.g. in a container."""
    if not hasattr(os, "getuid"):  # Windows
        return ""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _parse(content: bytes, path: str) -> tuple[Document, tuple[str, ...]]:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        return NO_DOCUMENT, (f"{path}:{line}: The file is not UTF-8 text.",)
    with _without_plugins():
        # Imported here, because a process without a file needs neither YAML nor pydantic.
        from otel_limits.settings.policy.reader import parse

        return parse(text, path)


@contextlib.contextmanager
def _without_plugins() -> Iterator[None]:
    """Let pydantic load no plugins of other packages for the models of a policy file.

    Logfire's takes three times as long as a command. An application that has imported pydantic has
    loaded its plugins; otherwise they are loaded for its own models.
    """
    if "pydantic" in sys.modules:
        yield
        return
    before = variable(PLUGINS)
    set_variable(PLUGINS, "__all__")
    try:
        yield
    finally:
        set_variable(PLUGINS, before)


def _stamp(path: str) -> Stamp:
    """Return values that change with every version and with its permissions."""
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    # `chmod` changes only the ctime, replacing the file may change only the inode.
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino


# --- write access, which tools of an agent share with its user ------------------------------------

CHANGEABLE: Final = (
    "Agents that run as this user can change policy file {path}, e.g. with a shell tool. "
    "To prevent this, run them as a user that owns neither the file nor its directory, or mount "
    "the file read-only."
)


def is_changeable(path: str) -> bool:
    """Return whether the user of this process can write, replace or take over a file.

    False on Windows, where neither modes nor `os.access` show who can write a file.
    """
    if not hasattr(os, "getuid"):
        return False
    try:
        return any(map(_is_under_control, _places(Path(path))))
    except OSError:
        return False


def is_shared(path: str) -> bool:
    """Return whether a file belongs to another user, or can be written by every user.

    A file that its user can change is usual on the machine of a developer; this is a mistake.
    """
    try:
        status = Path(path).stat()
    except OSError:  # just removed
        return False
    return status.st_uid != os.getuid() or bool(status.st_mode & stat.S_IWOTH)


def _places(path: Path) -> Iterator[Path]:
    """Yield a file and the directories and links that lead to it, up to a read-only file system.

    A user that can change one of these can replace the file.
    """
    # Not `Path.resolve`, which raises RuntimeError for a loop of links before Python 3.13.
    for start in dict.fromkeys((Path(os.path.realpath(path, strict=True)), path.absolute())):
        for place in (start, *start.parents):
            # A file mounted on its own cannot be renamed, so its directory does not matter. A link
            # to it can be replaced.
            if not place.is_symlink():
                if os.statvfs(place).f_flag & os.ST_RDONLY:
                    break
                yield place


def _is_under_control(place: Path) -> bool:
    """Return whether this user can write to a file, or replace files in a directory."""
    status = place.stat()
    # The owner can change the mode.
    if status.st_uid == os.getuid():
        return True
    # In a sticky directory, such as /tmp, users can only replace their own files.
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    return os.access(place, os.W_OK) and not (is_sticky and os.getuid() != 0)
