"""Enables and disables otel-limits, in code or from the environment."""

from __future__ import annotations

import _thread
import atexit
import functools
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from otel_limits.bindings.entry_points import Installed, entry_points_of
from otel_limits.bindings.known import know, know_installed, known_entry_points, missing_framework
from otel_limits.core.errors import ConfigurationError
from otel_limits.core.internal_errors import INTERNAL_ERRORS
from otel_limits.core.limits import (
    LIMITS,
    NO_LIMITS,
    PRESET,
    SHARED_LIMITS,
    Limits,
    caller_location,
    require_limits,
)
from otel_limits.core.policy import Action, Overrides
from otel_limits.core.secrets import quote_value, redact_value
from otel_limits.core.wording import closest_match
from otel_limits.runs.registry import LIVE, kill
from otel_limits.runtime.flush import flush_on_sigterm, report_unscraped
from otel_limits.runtime.guard import Source, end_process
from otel_limits.runtime.runtime import RUNTIME
from otel_limits.settings.children import (
    CHILD_ENVIRONMENT,
    HANDED,
    Inherited,
    has_fork_server,
    inherited,
    obstacle_of_children,
)
from otel_limits.settings.policy.file import PolicyFile, price_mistakes
from otel_limits.settings.settings_reader import Reading, read_settings
from otel_limits.settings.table import SETTINGS
from otel_limits.settings.variables import environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Unpack

    from otel_limits.core.events import Observer
    from otel_limits.core.limits import Caps

logger = logging.getLogger("otel_limits")

ARGUMENTS: Final = (
    "limits",
    "action",
    "tree",
    "conversation",
    "halt_message",
    "observers",
    "children",
)
"""Arguments of `enable()` other than single caps."""

LATE_FOR_FORK_SERVER: Final = (
    "otel-limits: children of the fork server of multiprocessing are not limited, because it was "
    "started before enable(). Call enable() before the first of them, or in each."
)


def enable(  # noqa: PLR0913  each is a part of the policy
    limits: Limits | None = None,
    *,
    action: Action | None = None,
    tree: Limits | None = None,
    conversation: Limits | None = None,
    halt_message: str | None = None,
    observers: Sequence[Observer] = (),
    children: bool = True,
    **caps: Unpack[Caps],
) -> None:
    """Limit all agents of this process, existing and new: `enable(max_turns=30)`.

    Arguments override the environment, the policy file overrides both, and a `LimitsPlugin`
    overrides all. Another call replaces the arguments of the last one for new invocations.

    Child processes inherit the arguments through their environment, except for observers. Their own
    variables and calls override them.

    Args:
        limits: Caps. Those that are `None` come from the environment.
        action: `observe`, `halt`, `wrap_up`, `raise` or `ask`.
        tree: Caps of a budget tree: an invocation and all agents it starts.
        conversation: Caps of a conversation: all invocations of a thread or session.
        halt_message: Text of a halt for the end user, with any of the fields `{agent}`, `{reason}`,
            `{limit}` and `{used}`.
        observers: Functions called with every event (`otel_limits.Event`). Their errors are logged
            and counted, and don't affect agents.
        children: Limit agents of child processes as well. False leaves `os.environ` unchanged.
        caps: Single caps, by the names of `Limits`. They override those in `limits`, as in
            `enable(DEFAULTS, max_turns=5)`.

    Raises:
        ConfigurationError: A variable or an argument is invalid; nothing was changed. It is a
            `ValueError`.
    """
    _require_known(caps)
    reading = read_settings()
    policy_file = PolicyFile(reading.settings.policy_path)
    mistakes = [*reading.mistakes, *policy_file.mistakes]
    try:
        limits = require_limits("limits", NO_LIMITS if limits is None else limits)
        own = Overrides(
            limits=Limits(**caps).merged_over(limits),
            tree=NO_LIMITS if tree is None else tree,
            conversation=NO_LIMITS if conversation is None else conversation,
            action=action,
            halt_message=halt_message,
            origin=caller_location("enable"),
        )
        _require_observers(observers)
    except ValueError as error:
        raise ConfigurationError([*mistakes, str(error)]) from None
    policy = reading.settings.policy.overridden_by(own)
    mistakes += price_mistakes(policy, policy_file.document)
    if mistakes:
        raise ConfigurationError(mistakes)
    settings = replace(reading.settings, policy=policy)
    installed = Installed() if settings.disabled else _know_installed(tuple(sys.path))
    RUNTIME.start(settings, observers, policy_file)
    RUNTIME.report_broken(installed.broken)
    _warn(reading, "code")
    _warn_without_framework()
    if children and not settings.disabled:
        _limit_children(own, len(observers))
    else:
        CHILD_ENVIRONMENT.restore()


def _require_known(caps: Mapping[str, object]) -> None:
    """Check the names of caps, with the message of Python and the fix."""
    unknown = next((name for name in caps if name not in LIMITS), None)
    if unknown is None:
        return
    settings = {setting.name: setting.variable for setting in SETTINGS}
    # `tree_max_turns` also resembles the argument `tree`.
    near = unknown if unknown in settings else closest_match(unknown, (*ARGUMENTS, *settings))
    hint = f". Did you mean {near}?"
    if near is None:
        hint = ""
    elif shared := next((each for each in SHARED_LIMITS if near.startswith(f"{each}_max")), None):
        cap = near.removeprefix(f"{shared}_")
        hint = f". Use {shared}=Limits({cap}={quote_value(caps[unknown])})."
    elif near not in LIMITS and near not in ARGUMENTS:
        # Without the value, which may contain a password.
        hint = f". Set {settings[near]} in the environment instead."
    raise TypeError(f"enable() got an unexpected keyword argument {quote_value(unknown)}{hint}")


def _limit_children(own: Overrides, observers: int) -> None:
    """Let child processes inherit the arguments, or report why they cannot."""
    if (obstacle := obstacle_of_children()) is not None:
        _warn_about_children(obstacle)
        return
    if has_fork_server() and not CHILD_ENVIRONMENT.is_written:
        logger.warning(LATE_FOR_FORK_SERVER)
    CHILD_ENVIRONMENT.write(own, observers, known_entry_points().text)


@functools.lru_cache(maxsize=1)
def _know_installed(_path: tuple[str, ...]) -> Installed:
    """Read which frameworks other distributions limit, and log what is not used of it.

    Once, unless a program adds directories to `sys.path`: they may contain others.
    """
    installed = know_installed()
    for sentence in installed.unused:
        logger.warning("otel-limits: %s", sentence)
    return installed


@functools.cache
def _warn_without_framework() -> None:
    """Report once that there can be no agent."""
    if (missing := missing_framework()) is not None:
        for sentence in (missing, *known_entry_points().absent):
            logger.warning("otel-limits: %s", sentence)


@functools.cache
def _warn_about_children(obstacle: str) -> None:
    """Report once that child processes are not limited."""
    logger.warning(
        "otel-limits: child processes are not limited unless forked: %s. Call enable() in them, "
        "or pass children=False here if there are none.",
        obstacle,
    )


def _require_observers(observers: object) -> None:
    """Check that every observer can be called, before an event is lost.

    Raises:
        ValueError: It is not a sequence of callables.
    """
    if not (isinstance(observers, Sequence) and all(map(callable, observers))):
        raise ValueError(f"observers must be a list of callables, got {quote_value(observers)}.")


def disable() -> None:
    """Undo `enable()`. Agents with a `LimitsPlugin` keep its limits."""
    CHILD_ENVIRONMENT.restore()
    RUNTIME.stop()
    INTERNAL_ERRORS.forget_logged()


def enable_leniently(source: Source) -> None:
    """Enable from the environment without raising, which would stop other instrumentations.

    Limits that the parent process set with `enable()` apply as well. Invalid settings are logged
    and counted, and valid ones apply. With `OTEL_LIMITS_STRICT=true` the process exits with status
    2 instead.
    """
    parent, unreadable = Inherited(), list[str]()
    try:
        parent = inherited() or parent
    except ValueError as error:
        unreadable.append(str(error))
    reading = read_settings(parent.variables or None)
    policy_file = PolicyFile(reading.settings.policy_path)
    policy = reading.settings.policy.overridden_by(parent.own)
    settings = replace(reading.settings, policy=policy)
    unpriced = price_mistakes(policy, policy_file.document)
    mistakes = (*unreadable, *reading.mistakes, *policy_file.mistakes, *unpriced)
    if mistakes and settings.strict:
        end_process(mistakes)
    handed, installed = environment().get(HANDED), Installed()
    try:
        if handed is not None:
            know(entry_points_of(handed))
        elif not settings.disabled:
            installed = _know_installed(tuple(sys.path))
        RUNTIME.start(settings, policy_file=policy_file, source=source)
    except Exception as error:
        if settings.strict:
            end_process([f"Enabling failed ({redact_value(repr(error))})."])
        RUNTIME.report_disabled(source, f"enabling failed ({redact_value(repr(error))}).")
        # Log the traceback at DEBUG only.
        logger.debug("otel-limits: enabling failed", exc_info=True)
        return
    RUNTIME.report_broken(installed.broken)
    # The mistakes of the policy file have been logged with their consequences.
    for mistake in (*unreadable, *reading.mistakes, *unpriced):
        logger.error("otel-limits: %s All other settings apply.", mistake)
        LIVE.observers.publish_internal_error("config")
    _warn(reading, source)
    if parent.observers:
        logger.warning(
            "otel-limits: limits are those of %s in the parent process, but its observers are not "
            "called here. Call enable() with them in this process.",
            parent.own.origin,
        )


def _warn(reading: Reading, source: Source) -> None:
    """Log variables that look misspelled, and the limits of a preset."""
    for warning in reading.warnings:
        logger.warning("otel-limits: %s", warning)
    preset = PRESET + reading.settings.preset
    caps = [
        f"{name}={reading.values[name]}" for name, of in reading.sources.items() if of == preset
    ]
    # Under `otel-limits run`, the line at the first call names the preset and its limits.
    if caps and (source != "run" or reading.settings.quiet):
        logger.warning("otel-limits: preset %r sets %s.", reading.settings.preset, ", ".join(caps))


def enable_for_run() -> None:
    """Enable in a program started by `otel-limits run`."""
    if not RUNTIME.is_on:
        enable_leniently("run")
    atexit.register(report_unscraped)
    _provide_missing()


def enable_for_autoload() -> None:
    """Enable in an environment with autoload, if a setting is present.

    A misspelled name counts: its author believes that a limit is set.
    """
    reading = read_settings()
    if not (reading.given or reading.mistakes or reading.warnings):
        return
    if not RUNTIME.is_on:
        enable_leniently("autoload")
    _provide_missing()


def enable_for_parent() -> None:
    """Enable in a child process of a program that called `enable()`."""
    if not RUNTIME.is_on:
        enable_leniently("parent")


def _provide_missing() -> None:
    RUNTIME.provide_when_missing()
    _kill_on_signal()
    flush_on_sigterm()


def _kill_on_signal() -> None:
    """Kill all live invocations on SIGUSR2, unless the program handles the signal."""
    name = getattr(signal, "SIGUSR2", None)
    # Python sets handlers only in the main thread, and Windows has no such signal.
    if name is None or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(name) is signal.SIG_DFL:
        # The main thread, which runs the handler, may hold one of our locks, or of `threading`;
        # another thread can wait for it.
        signal.signal(name, lambda *_: _thread.start_new_thread(kill, (), {"all": True}))
