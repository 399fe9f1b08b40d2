"""Examines the settings as they are, and everything that they name; nothing is left anywhere."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from otel_limits.cli.doctor.finding import Finding, fail, ok, skipped
from otel_limits.core.limits import NO_LIMITS
from otel_limits.core.pricing import Prices
from otel_limits.core.secrets import redact_url
from otel_limits.core.usage import Usage
from otel_limits.core.wording import pluralize
from otel_limits.quotas.store import Count, StoreError, StorePlace
from otel_limits.quotas.stores import is_shared, open_shared_store
from otel_limits.quotas.windows import Window
from otel_limits.runtime.wiring import PORT_IS_TAKEN
from otel_limits.settings import environment as config
from otel_limits.settings.ledgers import default_ledger, ledger_address
from otel_limits.settings.policy.file import PolicyFile, policy_mistakes
from otel_limits.top.endpoints import Endpoint
from otel_limits.top.scrapes import ScrapeError

if TYPE_CHECKING:
    from otel_limits.ledger.address import Address
    from otel_limits.quotas.store import SharedStore
    from otel_limits.settings.environment import Reading
    from otel_limits.settings.table import Settings

ROUND_TRIPS: Final = 5

PROBE: Final = Count("otel-limits doctor", "0" * 16, Window(0, 1), "tokens")
"""A count that nobody has: looking at it runs a script, and writes nothing."""


def examine_settings(environ: Mapping[str, str], model: str | None) -> Iterator[Finding]:
    """Look at every setting that an application with this environment would have.

    Args:
        environ: Its variables.
        model: Id of the model whose price is to be known.
    """
    reading = config.read(environ)
    policy_file = PolicyFile(reading.settings.policy_path)
    yield from _values(reading)
    yield from _policy(reading, policy_file)
    yield _prices(reading.settings, policy_file, model)
    yield _port(reading.settings)
    yield from _ledger(reading.settings.ledger)
    yield _store(reading.settings)


def _values(reading: Reading) -> Iterator[Finding]:
    """Report what is wrong with single settings."""
    for mistake in (*reading.mistakes, *getattr(reading, "warnings", ())):
        yield fail("settings", mistake)
    if reading.settings.disabled:
        yield fail(
            "settings",
            "OTEL_LIMITS_DISABLED is true: nothing is limited.",
            "Unset it.",
        )
    if not reading.mistakes:
        count = sum(source == "environment" for source in reading.sources.values())
        yield ok("settings", f"{count} set, all valid.", "otel-limits check prints them.")


def _policy(reading: Reading, policy_file: PolicyFile) -> Iterator[Finding]:
    mistakes = policy_mistakes(reading, policy_file)
    for mistake in mistakes:
        yield fail("policy", mistake)
    document, policy = policy_file.document, reading.settings.policy
    if reading.settings.policy_path is None:
        yield skipped("policy", "OTEL_LIMITS_POLICY is not set.")
    elif not policy_file.mistakes:
        yield ok("policy", f"{redact_url(reading.settings.policy_path)} is valid.")
    capped = policy.limits != NO_LIMITS or policy.tree != NO_LIMITS
    if not (capped or document.defaults or document.agents or document.quotas):
        yield skipped(
            "limits",
            "No limit is set, so that nothing would be halted.",
            "Set one, such as OTEL_LIMITS_MAX_TURNS=30.",
        )


def _prices(settings: Settings, policy_file: PolicyFile, model: str | None) -> Finding:
    prices = Prices(policy_file.document.price_list())
    if model is None:
        return skipped("prices", "No model was named.", "otel-limits doctor --model NAME")
    # A million of each: large enough that a price is a number which people know.
    price = prices.price(model, Usage(input=1_000_000, output=1_000_000))
    if price is not None:
        return ok(
            "prices",
            f"{redact_url(model)}: {price:.2f} USD for a million tokens in and a million out "
            f"({prices.source}).",
        )
    capped = [settings.policy.limits.max_cost_usd, settings.policy.tree.max_cost_usd]
    effect = "so max_cost_usd does not hold for it" if any(capped) else "so its cost is not known"
    return fail(
        "prices",
        f"{redact_url(model)} has no price ({prices.source}), {effect}.",
        "Set it in the policy file below models:, or pip install 'otel-limits[prices]'.",
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
            # As in a container whose agents are at work while it is examined.
            return ok(
                "metrics port",
                f"{redact_url(host)} port {port} is served by a process with otel-limits already.",
                PORT_IS_TAKEN,
            )
        reason = getattr(error, "strerror", None) or error
        return fail(
            "metrics port",
            f"{redact_url(host)} port {port} cannot be served: {reason}.",
            PORT_IS_TAKEN,
        )
    return ok("metrics port", f"{redact_url(host)} port {port} is free.")


def _is_served(host: str, port: int) -> bool:
    """Tell whether metrics of otel-limits are served there; all addresses are asked on one."""
    try:
        Endpoint(f"[{host}]:{port}" if ":" in host else f"{host}:{port}").samples(time.time())
    except (ScrapeError, ValueError):
        return False
    return True


def _ledger(address: Address | None) -> Iterator[Finding]:
    """Look at the ledger, or at the one that `otel-limits run` would keep."""
    if address is None:
        default = default_ledger()
        yield skipped(
            "ledger",
            f"OTEL_LIMITS_LEDGER is not set; otel-limits run would keep {default}.",
        )
        address = ledger_address("The ledger", default)
    else:
        from otel_limits.ledger.access import refusal_of

        refusal = refusal_of(address)
        if refusal is None:
            yield ok("ledger", f"{address} can be written.")
        else:
            yield fail(
                "ledger",
                f"{address} cannot be written: {refusal}.",
                f"Until it can, rows wait in {address.spills[0]}.spill-*.jsonl.",
            )
    assert address is not None
    yield _spilled(address)


def _spilled(address: Address) -> Finding:
    from otel_limits.ledger.spill import SpillFiles

    files = SpillFiles(address).files()
    if not files:
        return skipped("spilled rows", "No rows wait for the ledger.")
    size = sum(file.stat().st_size for file in files)
    waiting = pluralize(size, "byte of rows waits", "bytes of rows wait")
    return ok(
        "spilled rows",
        f"{waiting} in {', '.join(map(str, files))}.",
        "The next process that writes to the ledger takes them over.",
    )


def _store(settings: Settings) -> Finding:
    timeout = settings.quota_store_timeout
    place = StorePlace(settings.quota_store, timeout, settings.quota_namespace)
    if not is_shared(place.url):
        return skipped("quota store", "Quotas are counted in each process by itself.")
    try:
        store = open_shared_store(place)
        try:
            seconds = _round_trip(store)
        finally:
            store.close()
    except StoreError as error:
        return fail(
            "quota store",
            f"It cannot be used: {error}.",
            "Check OTEL_LIMITS_QUOTA_STORE, and that its user may write keys and run scripts.",
        )
    text = f"A round trip takes {seconds * 1000:.1f} of {timeout * 1000:.0f} ms."
    if seconds > timeout / 2:
        return fail("quota store", text, "Move the store closer: agents would often not wait.")
    return ok("quota store", text)


def _round_trip(store: SharedStore) -> float:
    """Do what agents need of a store; return the seconds of a round trip, the median of some."""
    store.check()
    store.look([(PROBE, 0)])
    seconds = []
    for _ in range(ROUND_TRIPS):
        begin = time.perf_counter()
        store.now()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[ROUND_TRIPS // 2]
