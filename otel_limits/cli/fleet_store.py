"""The fleet's quota store and quotas, as commands open them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from otel_limits.cli.command import refuse
from otel_limits.core.errors import ConfigurationError
from otel_limits.core.limits import CONVERSATION, CONVERSATION_PREFIX, SHARED_LIMITS
from otel_limits.quotas.store import StoreError, StorePlace
from otel_limits.quotas.stores import is_shared, open_shared_store, version_problem
from otel_limits.settings.policy.file import valid_document
from otel_limits.settings.settings_reader import settings_with

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from otel_limits.core.limits import Limits
    from otel_limits.quotas.quota import Quota
    from otel_limits.quotas.store import SharedStore

NO_ANSWER: Final = 1
TIMEOUT_SECONDS: Final = 2.0
SET_A_STORE: Final = "Set OTEL_LIMITS_QUOTA_STORE, e.g. redis://localhost:6379/0."
IN_MEMORY: Final = f"Quotas are kept in process memory and cannot be read from here. {SET_A_STORE}"


def exit_status(command: Callable[[Namespace], None]) -> Callable[[Namespace], int]:
    """Make a command print user errors (`ValueError`) and return its exit status."""

    def call(options: Namespace) -> int:
        try:
            command(options)
        except ConfigurationError as error:
            return refuse(error.mistakes)
        except ValueError as error:
            return refuse([str(error)])
        except StoreError as error:
            return refuse([f"quota store unavailable ({error})"], NO_ANSWER)
        return 0

    return call


def known_quotas(*, is_required: bool = True) -> list[Quota]:
    """Return the quotas of the policy file.

    Raises:
        ConfigurationError: It contains mistakes.
        ValueError: It has none although it must.
    """
    quotas = [entry.value for entry in valid_document().quotas.values()]
    if not quotas and is_required:
        raise ValueError("No quotas found. Set OTEL_LIMITS_POLICY to a policy file with quotas.")
    return quotas


def caps_of_conversations() -> Callable[[str], Limits] | None:
    """Return a function that returns the caps of an agent's conversations; `None` without any.

    Raises:
        ConfigurationError: The policy file contains mistakes.
    """
    names = [f"{CONVERSATION_PREFIX}{name}" for name in SHARED_LIMITS[CONVERSATION]]
    document, policy = valid_document(), settings_with(*names).policy
    if not any(each.conversation.active for each in document.policies(policy).values()):
        return None
    return functools.cache(lambda agent: document.effective(agent, policy).conversation)


def shared_store() -> SharedStore:
    """Open the shared store of the fleet, to read or change quotas.

    Raises:
        ValueError: Quotas are kept in memory, the URL is invalid, or the server is too old.
        StoreError: It is unavailable.
    """
    store = fleet_store(IN_MEMORY)
    # It might show keys as unused.
    if problem := version_problem(store):
        raise ValueError(f"OTEL_LIMITS_QUOTA_STORE: {problem}")
    return store


def fleet_store(unset: str) -> SharedStore:
    """Open the shared store of the fleet.

    Args:
        unset: The error if quotas are kept in memory.

    Raises:
        ValueError: Quotas are kept in memory, or the URL is invalid.
    """
    settings = settings_with("quota_store", "quota_namespace")
    if not is_shared(settings.quota_store):
        raise ValueError(unset)
    return open_shared_store(
        StorePlace(settings.quota_store, TIMEOUT_SECONDS, settings.quota_namespace)
    )
