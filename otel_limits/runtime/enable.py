"""Switches otel-limits on and off: in one line of code, or from the environment alone."""

from __future__ import annotations

import atexit
import functools
import logging
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from otel_limits.core.errors import ConfigurationError
from otel_limits.core.limits import NO_LIMITS, Limits, require_limits, require_tree
from otel_limits.core.origins import caller_location
from otel_limits.core.policy import ACTION, Action
from otel_limits.core.secrets import redact_url
from otel_limits.runs.registry import LIVE, kill
from otel_limits.runtime.guard import Source, end_process
from otel_limits.runtime.leaving import flush_on_sigterm, say_if_unscraped
from otel_limits.runtime.runtime import RUNTIME
from otel_limits.settings import environment as config
from otel_limits.settings.policy.file import PolicyFile, price_mistakes

if TYPE_CHECKING:
    from otel_limits.core.events import Observer

logger = logging.getLogger("otel_limits")


def enable(
    limits: Limits | None = None,
    *,
    action: Action | None = None,
    tree: Limits | None = None,
    observers: Sequence[Observer] = (),
) -> None:
    """Limit every agent of this process: those that exist, and those made later.

    Without arguments the environment decides; an argument wins over it. The policy file wins over
    both, and a `LimitsPlugin` over everything. Calling it again is harmless, and with other
    arguments replaces what applies to invocations that begin afterwards.

    Args:
        limits: Caps; one that is `None` is taken from the environment.
        action: `observe`, `halt`, `wrap_up`, `raise` or `ask`.
        tree: Caps for an invocation together with everything that it starts.
        observers: Called with every event (see `otel_limits.Fact`); one that fails is logged and
            counted, and never felt by the agent.

    Raises:
        ConfigurationError: A setting of the environment or an argument is invalid; nothing was
            changed. It is a `ValueError`.
    """
    reading = config.read()
    policy_file = PolicyFile(reading.settings.policy_path)
    mistakes = [*reading.mistakes, *policy_file.mistakes]
    try:
        limits, tree = _checked(limits, tree, action)
        _require_observers(observers)
    except ValueError as error:
        # At once, as what follows reads all of them.
        raise ConfigurationError([*mistakes, str(error)]) from None
    policy = reading.settings.policy.merged_over(limits, action, tree, caller_location("enable"))
    mistakes += price_mistakes([policy.limits, policy.tree], policy_file.document)
    if mistakes:
        raise ConfigurationError(mistakes)
    settings = replace(reading.settings, policy=policy)
    RUNTIME.start(settings, observers, policy_file)
    _warn(reading)


def _checked(
    limits: Limits | None, tree: Limits | None, action: Action | None
) -> tuple[Limits, Limits]:
    """Return the caps that were given, which may be none at all.

    Raises:
        ValueError: An argument is invalid.
    """
    ACTION.of_value("action", "halt" if action is None else action)
    limits = require_limits("limits", NO_LIMITS if limits is None else limits)
    return limits, require_tree(NO_LIMITS if tree is None else tree)


def _require_observers(observers: object) -> None:
    """Refuse what cannot be told anything: an event would come too late to say so.

    Raises:
        ValueError: It is not a sequence of callables.
    """
    can_be_told = isinstance(observers, Sequence) and all(map(callable, observers))
    if not can_be_told:
        raise ValueError(f"observers must be a list of callables, got {observers!r:.100}.")


def disable() -> None:
    """Undo `enable()` completely; an agent with a `LimitsPlugin` keeps its limits."""
    RUNTIME.stop()


def enable_leniently(source: Source) -> None:
    """Enable from the environment where an exception would take others down with it.

    A mistake is logged as an error and counted, and every valid setting is in force all the same;
    with `OTEL_LIMITS_STRICT=true` the process ends with status 2 instead.
    """
    reading = config.read()
    policy_file = PolicyFile(reading.settings.policy_path)
    policy = reading.settings.policy
    unpriced = price_mistakes([policy.limits, policy.tree], policy_file.document)
    mistakes = (*reading.mistakes, *policy_file.mistakes, *unpriced)
    if mistakes and reading.settings.strict:
        end_process(mistakes)
    try:
        RUNTIME.start(reading.settings, policy_file=policy_file, source=source)
    except Exception as error:
        if reading.settings.strict:
            end_process([f"It cannot be switched on ({error!r})."])
        RUNTIME.say_off(source, f"switching it on failed ({redact_url(repr(error))}).")
        # A stack is for whoever looks for it: to a stranger it says nothing.
        logger.debug("otel-limits: why it could not be switched on", exc_info=True)
        return
    # Those of the policy file have been logged by now, with what is in force instead of it.
    for mistake in (*reading.mistakes, *unpriced):
        logger.error("otel-limits: %s Every other setting is in force.", mistake)
        LIVE.observers.publish_internal_error("config")
    _warn(reading)


def _warn(reading: config.Reading) -> None:
    """Say what may have been meant for us, and which limits nobody has set one by one."""
    for warning in reading.warnings:
        logger.warning("otel-limits: %s", warning)
    preset = f"preset {reading.settings.preset}"
    caps = [
        f"{name}={reading.values[name]}" for name, of in reading.sources.items() if of == preset
    ]
    if caps:
        logger.warning("otel-limits: preset %r sets %s.", reading.settings.preset, ", ".join(caps))


def enable_for_run() -> None:
    """Enable in a program that `otel-limits run` started, and provide what it lacks."""
    if not RUNTIME.is_on:
        enable_leniently("run")
    atexit.register(say_if_unscraped)
    _provide_what_is_missing()


def enable_for_autoload() -> None:
    """Do the same in an environment that autoloads us, where anything of ours is set.

    A name that is almost ours counts: whoever misspelt it believes to have set a limit.
    """
    reading = config.read()
    is_set = "environment" in reading.sources.values()
    if not (is_set or reading.mistakes or reading.warnings):
        return
    if not RUNTIME.is_on:
        enable_leniently("autoload")
    _provide_what_is_missing()


def _provide_what_is_missing() -> None:
    RUNTIME.provide_when_missing()
    _kill_on_signal()
    flush_on_sigterm()


def _kill_on_signal() -> None:
    """End every live invocation on SIGUSR2, unless the program uses the signal itself."""
    name = getattr(signal, "SIGUSR2", None)
    # Python permits handlers to be set in the main thread alone, and Windows has no such signal.
    if name is None or threading.current_thread() is not threading.main_thread():
        return
    # An application that handles the signal means something else by it.
    if signal.getsignal(name) is signal.SIG_DFL:
        # A handler runs between two instructions of whatever the main thread does, which may hold
        # one of our locks: a thread can wait for it.
        end_all = functools.partial(kill, all=True)
        signal.signal(name, lambda *_: threading.Thread(target=end_all).start())
