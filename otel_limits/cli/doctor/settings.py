"""Checks the settings and the files and servers they refer to, without side effects."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from otel_limits.cli.doctor.finding import Finding, fail, ok, skipped, warn
from otel_limits.cli.effects import agents, observed_only, unpriced_halts
from otel_limits.core.limits import NO_LIMITS
from otel_limits.core.list_date import list_in_use, old_list
from otel_limits.core.pricing import Prices
from otel_limits.core.secrets import redact_url
from otel_limits.core.usage import Usage
from otel_limits.core.wording import pluralize
from otel_limits.quotas.store import Count, StoreError, StorePlace
from otel_limits.quotas.stores import is_shared, open_shared_store, version_problem
from otel_limits.quotas.windows import Window
from otel_limits.runtime.wiring import PORT_IS_TAKEN
from otel_limits.settings import environment as config
from otel_limits.settings.ledgers import default_ledger, ledger_address
from otel_limits.settings.policy.file import PolicyFile, access_warning, policy_mistakes

if TYPE_CHECKING:
    from otel_limits.core.policy import Policy
    from otel_limits.ledger.address import Address
    from otel_limits.quotas.store import SharedStore
    from otel_limits.settings.environment import Reading
    from otel_limits.settings.table import Settings

ROUND_TRIPS: Final = 5

PROBE: Final = Count("otel-limits doctor", "0" * 16, Window(0, 1), "tokens")
"""A key that is not in use. Reading it runs a script and writes nothing."""


def examine_settings(environ: Mapping[str, str], model: str | None) -> Iterator[Finding]:
    """Check the settings of an application.

    Args:
        environ: The application's variables.
        model: A model ID that must have a price.
    """
    reading = config.read(environ)
    policy_file = PolicyFile(reading.settings.policy_path)
    policies = policy_file.document.policies(reading.settings.policy)
    yield from _values(reading)
    yield from _policy(reading, policy_file)
    yield _action(policies)
    halted = unpriced_halts(policies)
    if halted is not None:
        yield warn("unpriced", halted)
    yield _prices(reading.settings, policy_file, model)
    yield _price_list()
    yield _port(reading.settings)
    yield from _ledger(reading.settings.ledger)
    yield _store(reading.settings)


def _values(reading: Reading) -> Iterator[Finding]:
    """Report invalid settings."""
    for mistake in (*reading.mistakes, *getattr(reading, "warnings", ())):
        yield fail("settings", mistake)
    if reading.settings.disabled:
        yield fail(
            "settings",
            "OTEL_LIMITS_DISABLED is true, so no limits are enforced.",
            "Unset it.",
        )
    if not reading.mistakes:
        count = sum(source == "environment" for source in reading.sources.values())
        yield ok("settings", f"{count} set, all valid.", "otel-limits check shows them.")


def _policy(reading: Reading, policy_file: PolicyFile) -> Iterator[Finding]:
    mistakes = policy_mistakes(reading, policy_file)
    for mistake in mistakes:
        yield fail("policy", mistake)
    document, policy = policy_file.document, reading.settings.policy
    if reading.settings.policy_path is None:
        yield skipped("policy", "OTEL_LIMITS_POLICY is not set.")
    elif not policy_file.mistakes:
        yield ok("policy", f"{redact_url(reading.settings.policy_path)} is valid.")
    if (warning := access_warning(policy_file)) is not None:
        yield warn("policy file", warning)
    capped = policy.limits != NO_LIMITS or policy.tree != NO_LIMITS
    if not (capped or document.defaults or document.agents or document.quotas):
        yield skipped(
            "limits",
            "No limits set, so no agent would be halted.",
            "Set one, e.g. OTEL_LIMITS_MAX_TURNS=30.",
        )


def _action(policies: Mapping[str, Policy]) -> Finding:
    """Report agents that no limit halts because it is only observed."""
    observed = observed_only(policies)
    if len(observed) == len(policies):
        return fail(
            "action",
            "The action is observe, so no agent would be halted.",
            "Unset OTEL_LIMITS_ACTION, and action in the policy file, or set them to halt.",
        )
    if observed:
        return ok("action", f"Limits are only observed for {agents(observed, policies)}.")
    return ok("action", f"{', '.join(sorted({each.action for each in policies.values()}))}.")


def _price_list() -> Finding:
    in_use = list_in_use()
    if in_use is None:
        advice = "pip install 'otel-limits[prices]' (Python 3.11 or newer)"
        return skipped("price list", "Not installed.", advice)
    if (warning := old_list()) is not None:
        return warn("price list", warning)
    return ok("price list", f"{in_use}.")


def _prices(settings: Settings, policy_file: PolicyFile, model: str | None) -> Finding:
    prices = Prices(policy_file.document.price_list())
    if model is None:
        return skipped("prices", "No model given.", "otel-limits doctor --model NAME")
    # Per million, as vendors list prices.
    price = prices.price(model, Usage(input=1_000_000, output=1_000_000))
    if price is not None:
        return ok(
            "prices",
            f"{redact_url(model)}: {price:.2f} USD for 1M input and 1M output tokens "
            f"({prices.source}).",
        )
    policy = policy_file.document.effective("", settings.policy)
    effect = "so its cost is unknown"
    if policy.halts_unpriced:
        effect = "so its first call halts the agent"
    elif policy.limits.max_cost_usd or policy.tree.max_cost_usd:
        effect = "so max_cost_usd does not cover it"
    return fail(
        "prices",
        f"{redact_url(model)} has no price ({prices.source}), {effect}.",
        "Add a price under models in the policy file, or run: pip install 'otel-limits[prices]'",
    )


def _port(settings: Settings) -> Finding:
    host, port = settings.prometheus_host, settings.prometheus_port
    if port is None:
        return skipped("metrics port", "OTEL_LIMITS_PROMETHEUS_PORT is not set.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the endpoint does
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE and _is_served(host, port):
            # E.g. by the agents of this container.
            return ok(
                "metrics port",
                f"{redact_url(host)} port {port} is already served by a process with otel-limits.",
                PORT_IS_TAKEN,
            )
        reason = getattr(error, "strerror", None) or error
        return fail(
            "metrics port",
            f"Cannot listen on {redact_url(host)} port {port}: {reason}.",
            PORT_IS_TAKEN,
        )
    return ok("metrics port", f"{redact_url(host)} port {port} is free.")


def _is_served(host: str, port: int) -> bool:
    """Return whether otel-limits metrics are served there."""
    from otel_limits.top.endpoints import Endpoint
    from otel_limits.top.scrapes import ScrapeError

    try:
        Endpoint(f"[{host}]:{port}" if ":" in host else f"{host}:{port}").samples(time.time())
    except (ScrapeError, ValueError):
        return False
    return True


def _ledger(address: Address | None) -> Iterator[Finding]:
    """Check the ledger, or the default one of `otel-limits run`."""
    if address is None:
        default = default_ledger()
        yield skipped(
            "ledger",
            f"OTEL_LIMITS_LEDGER is not set; otel-limits run would use {default}.",
        )
        address = ledger_address("The ledger", default)
    else:
        from otel_limits.ledger.access import write_error

        refusal = write_error(address)
        if refusal is None:
            yield ok("ledger", f"{address} is writable.")
        else:
            yield fail(
                "ledger",
                f"Cannot write to {address}: {refusal}.",
                f"Until then, rows are spilled to {address.spills[0]}.spill-*.jsonl.",
            )
    assert address is not None
    yield _spilled(address)


def _spilled(address: Address) -> Finding:
    files = []
    # Usually there is none, and SQLAlchemy takes long to import.
    if any(path for place in address.spills for path in place.parent.glob("*.spill-*")):
        from otel_limits.ledger.spill import SpillFiles

        files = SpillFiles(address).files()
    if not files:
        return skipped("spilled rows", "No spilled rows.")
    size = sum(file.stat().st_size for file in files)
    return ok(
        "spilled rows",
        f"{pluralize(size, 'byte')} in {', '.join(map(str, files))}.",
        "The next process that writes to the ledger imports them.",
    )


def _store(settings: Settings) -> Finding:
    timeout = settings.quota_store_timeout
    place = StorePlace(settings.quota_store, timeout, settings.quota_namespace)
    if not is_shared(place.url):
        return skipped("quota store", "Quotas are counted separately in each process.")
    try:
        store = open_shared_store(place)
        try:
            problem = version_problem(store)
            seconds = 0.0 if problem else _round_trip(store)
        finally:
            store.close()
    except StoreError as error:
        return fail(
            "quota store",
            f"Unavailable: {error}.",
            "Check OTEL_LIMITS_QUOTA_STORE, and that its user can write keys and run scripts.",
        )
    if problem:
        return fail("quota store", f"Unsupported: {problem}")
    text = f"Round trip: {seconds * 1000:.1f} ms (timeout: {timeout * 1000:.0f} ms)."
    if seconds > timeout / 2:
        return fail("quota store", text, "Move the store closer, or calls will often time out.")
    return ok("quota store", text)


def _round_trip(store: SharedStore) -> float:
    """Run the operations that agents need; return the median round trip in seconds."""
    store.check()
    store.look([(PROBE, 0)])
    seconds = []
    for _ in range(ROUND_TRIPS):
        begin = time.perf_counter()
        store.now()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[ROUND_TRIPS // 2]
