"""Checks the settings, and the files and servers they refer to, without side effects."""

from __future__ import annotations

import errno
import importlib.util
import logging
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from otel_limits.cli.doctor.finding import Finding, fail, ok, skipped, warn
from otel_limits.core.catalogue import UPGRADE, list_in_use, old_list
from otel_limits.core.installing import install_command
from otel_limits.core.labels import misspelled
from otel_limits.core.limits import NO_LIMITS
from otel_limits.core.price_lookup import Prices, install_list
from otel_limits.core.secrets import quote_value, redact_value
from otel_limits.core.terms import BillableCall
from otel_limits.core.usage import Usage
from otel_limits.core.values import item_of
from otel_limits.core.wording import pluralize
from otel_limits.observers.log import NAMED_ENTRY, UNLIMITED
from otel_limits.quotas.stores import is_shared, open_shared_store, version_problem
from otel_limits.runtime.wiring import PORT_IS_TAKEN
from otel_limits.settings.ledgers import default_ledger, ledger_address
from otel_limits.settings.policy.file import CHANGEABLE, is_changeable, policy_mistakes
from otel_limits.settings.settings_reader import DEFAULT
from otel_limits.settings.variables import CONFIGURATION_FILES, OTLP_PREFIX, otlp_protocol

if TYPE_CHECKING:
    from decimal import Decimal

    from otel_limits.cli.doctor.finding import Context
    from otel_limits.core.policy import Policy
    from otel_limits.quotas.store import SharedStore, StorePlace
    from otel_limits.settings.settings_reader import Reading
    from otel_limits.settings.table import Settings


ROUND_TRIPS: Final = 5

MILLION: Final = 1_000_000

REJECTED: Final = "{path} was rejected, so none of its limits apply."

NAMED: Final = 3
"""More settings are only counted."""


def disabled(context: Context) -> Iterator[Finding]:
    """Report that otel-limits is disabled."""
    if context.settings.disabled:
        text = "OTEL_LIMITS_DISABLED is true, so no limits are enforced."
        yield fail("settings", text, "Unset it.")


def values(context: Context) -> Iterator[Finding]:
    """Report invalid settings."""
    reading = context.reading
    for mistake in (*reading.mistakes, *reading.warnings):
        yield fail("settings", mistake)
    if not reading.mistakes:
        named = f" ({', '.join(reading.given)})" if 0 < len(reading.given) <= NAMED else ""
        text = f"{len(reading.given)} set{named}, all valid."
        yield ok("settings", text, "otel-limits check shows them.")


def policy(context: Context) -> Iterator[Finding]:
    """Report mistakes in the policy file."""
    for mistake in policy_mistakes(context.settings.policy, context.policy_file):
        yield fail("policy", mistake)
    if context.settings.policy_path is None:
        yield skipped("policy", "OTEL_LIMITS_POLICY is not set.")
    elif not context.policy_file.mistakes:
        yield ok("policy", f"{redact_value(context.settings.policy_path)} is valid.")


def policy_access(context: Context) -> Iterator[Finding]:
    """Report that agents can change the policy file."""
    path = context.settings.policy_path
    if path is not None and is_changeable(path):
        yield warn("policy file", CHANGEABLE.format(path=redact_value(path)))


def limits(context: Context) -> Iterator[Finding]:
    """Report that no limits are set."""
    policy, document = context.settings.policy, context.document
    caps = (policy.limits, policy.tree, policy.conversation)
    capped = any(each != NO_LIMITS for each in caps)
    if not (capped or document.defaults or document.agents or document.quotas):
        yield skipped(
            "limits",
            "No limits set, so no agent would be halted.",
            "Set one, e.g. OTEL_LIMITS_MAX_TURNS=30.",
        )


def agent(context: Context) -> Iterator[Finding]:
    """Report that the agent of interest may be misspelled, here or in the policy file."""
    entries = context.document.agents
    if context.agent and (near := misspelled(context.agent, entries)) is not None:
        yield warn(
            "agent", NAMED_ENTRY.format(entry=quote_value(near), agent=quote_value(context.agent))
        )


def unlimited(context: Context) -> Iterator[Finding]:
    """Report that no limits apply to the agent of interest, or to any."""
    # Only a warning, because metrics and a ledger are useful without limits.
    if context.has_limit:
        return
    path = context.settings.policy_path
    if path is not None and context.policy_file.mistakes:
        yield warn("limits", REJECTED.format(path=redact_value(path)))
    else:
        who = f"agent {quote_value(context.agent)}" if context.agent else "agents"
        yield warn("limits", UNLIMITED.format(who=who))


def quotas(context: Context) -> Iterator[Finding]:
    """Report quotas that single calls exceed, or wait for in vain."""
    if not context.document.quotas:
        return
    from otel_limits.quotas.quota import too_small, waits_in_vain

    for entry in context.document.quotas.values():
        for sentence in (too_small(entry.value), waits_in_vain(entry.value)):
            if sentence is not None:
                yield warn("quotas", sentence)


def models(context: Context) -> Iterator[Finding]:
    """Report models of the policy file that need a price list if none is installed."""
    document = context.document
    for glob, entry in () if Prices().has_list else document.prices.items():
        if entry.value.price is None and entry.value.priced_as is not None:
            yield warn(
                "models",
                f"{document.path}:{entry.line}: {item_of('models', glob)}.as needs the price list; "
                f"its calls have no price. Run: {install_list()}",
            )


def action(context: Context) -> Iterator[Finding]:
    """Report agents that no limit halts because it is only observed."""
    policies = context.policies
    observed = [name for name, each in policies.items() if _is_observed(each)]
    if len(observed) == len(policies):
        yield fail(
            "action",
            "The action is observe, so no agent would be halted.",
            f"Unset {context.reading.written('action')}, and action in the policy file, or set "
            "them to halt.",
        )
    elif observed:
        yield ok("action", f"Limits are only observed for {_agents(observed, policies)}.")
    else:
        yield ok("action", f"{', '.join(sorted({each.action for each in policies.values()}))}.")


def unpriced(context: Context) -> Iterator[Finding]:
    """Report agents that a call without a price halts, because only cost is limited."""
    policies = context.policies
    halted = [
        name
        for name, each in policies.items()
        if each.unpriced is None and each.halts_unpriced and not _is_observed(each)
    ]
    if halted:
        yield warn(
            "unpriced",
            f"Only limits in USD halt {_agents(halted, policies)}, so a model call without a price "
            "halts them, too. Add a limit in another unit, e.g. OTEL_LIMITS_MAX_TURNS=30, or set "
            "OTEL_LIMITS_UNPRICED=warn.",
        )


def _is_observed(policy: Policy) -> bool:
    """Return whether neither limits nor quotas halt an agent."""
    actions = (policy.action, *(action for _, action in policy.quotas if action is not None))
    return all(action == "observe" for action in actions)


def _agents(names: Collection[str], policies: Mapping[str, Policy]) -> str:
    """Name agents, given as names or globs."""
    if "" not in names:
        return f"agents {', '.join(map(quote_value, names))}"
    others = [quote_value(name) for name in policies if name not in names]
    return f"all agents except {', '.join(others)}" if others else "agents"


def price_list(_: Context) -> Iterator[Finding]:
    """Report the price list."""
    in_use = list_in_use()
    if in_use is None:
        yield skipped("price list", "Not installed.", install_list())
    elif (warning := old_list()) is not None:
        yield warn("price list", warning)
    else:
        yield ok("price list", f"{in_use}.")


def prices(context: Context) -> Iterator[Finding]:
    """Report the price of a model."""
    model, prices = context.model, Prices(context.document.price_list())
    if model is None:
        yield skipped("prices", "No model given.", "otel-limits doctor --model NAME")
        return
    name = redact_value(model)
    # Per million, as vendors list prices.
    long = prices.quote(BillableCall(model=model, usage=Usage(input=MILLION, output=MILLION)))
    if long.price is not None:
        yield ok("prices", f"{name}: {_per_million(long.price)} ({prices.source}).")
        return
    add = (
        f'Add models["{name}"].price with input and output, in USD per million tokens, to the '
        "policy file"
    )
    thousand = Usage(input=MILLION // 1_000, output=MILLION // 1_000)
    short = prices.quote(BillableCall(model=model, usage=thousand))
    bound = "" if long.at_most is None else f" Limits count at most {_per_million(long.at_most)}."
    if short.price is not None:
        yield warn(
            "prices",
            f"{name}: {_per_million(short.price * 1_000)} ({prices.source}), but a long prompt has "
            f"no {'exact ' if bound else ''}price: {long.unknown}.{bound}",
            f"{add}.",
        )
        return
    if bound:
        yield warn("prices", f"{name} has no exact price: {long.unknown}.{bound}", f"{add}.")
        return
    policy = context.document.effective("", context.settings.policy)
    effect = "so its cost is unknown"
    if policy.halts_unpriced:
        effect = "so its first call halts the agent"
    elif any(each.max_cost_usd for each in (policy.limits, policy.tree, policy.conversation)):
        effect = "so max_cost_usd does not cover it"
    yield fail(
        "prices",
        f"{name} has no price ({prices.source}), {effect}.",
        f"{add}, or run: {UPGRADE if prices.has_list else install_list()}",
    )


def _per_million(price: Decimal) -> str:
    return f"{price:.2f} USD for 1M input and 1M output tokens"


def port(context: Context) -> Iterator[Finding]:
    """Report whether the metrics port can be served."""
    host, port = context.settings.prometheus_host, context.settings.prometheus_port
    if port is None:
        text = "OTEL_LIMITS_PROMETHEUS_PORT is not set; otel-limits top needs it."
        yield skipped("metrics port", text)
        return
    shown = f"{redact_value(host)} port {port}"
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
            text = f"{shown} is already served by a process with otel-limits."
            yield ok("metrics port", text, PORT_IS_TAKEN)
        else:
            reason = getattr(error, "strerror", None) or error
            yield fail("metrics port", f"Cannot listen on {shown}: {reason}.", PORT_IS_TAKEN)
    else:
        yield ok("metrics port", f"{shown} is free.")


def _is_served(host: str, port: int) -> bool:
    """Return whether otel-limits metrics are served there."""
    from otel_limits.top.scrapes import Endpoint, ScrapeError

    try:
        Endpoint(f"[{host}]:{port}" if ":" in host else f"{host}:{port}").samples(time.time())
    except (ScrapeError, ValueError):
        return False
    return True


def ledger(context: Context) -> Iterator[Finding]:
    """Report whether the ledger is writable."""
    address = context.settings.ledger
    if address is None:
        yield skipped("ledger", *_no_ledger(context.reading))
        return
    from otel_limits.ledger.database import write_error

    refusal = write_error(address)
    if refusal is None:
        yield ok("ledger", f"{address} is writable.")
    else:
        yield fail(
            "ledger",
            f"Cannot write to {address}: {refusal}.",
            f"Until then, rows are spilled to {address.spills[0]}.spill-*.jsonl.",
        )


def _no_ledger(reading: Reading) -> tuple[str, str]:
    """Return why there is no ledger, and advice."""
    name = reading.written("ledger")
    if reading.sources["ledger"] != DEFAULT:
        problem = "none" if name in reading.given else "invalid"
        return f"{name} is {problem}, so nothing is recorded.", ""
    try:
        used, advice = default_ledger(), ""
    except ValueError as error:
        used, advice = "none", str(error)
    return f"{name} is not set; otel-limits run would use {used}.", advice


def spilled(context: Context) -> Iterator[Finding]:
    """Report rows that wait for the ledger, or for the default one of `otel-limits run`."""
    address = context.settings.ledger
    with suppress(ValueError):  # the user has no home directory
        address = address or ledger_address("The ledger", default_ledger())
    files = []
    # Usually there is none, and SQLAlchemy takes long to import.
    if address is not None and any(
        path for place in address.spills for path in place.parent.glob("*.spill-*")
    ):
        from otel_limits.ledger.spill import SpillFiles

        files = SpillFiles(address).files()
    if not files:
        yield skipped("spilled rows", "No spilled rows.")
        return
    size = sum(file.stat().st_size for file in files)
    yield ok(
        "spilled rows",
        f"{pluralize(size, 'byte')} in {', '.join(map(str, files))}.",
        "The next process that writes to the ledger imports them.",
    )


def store(context: Context) -> Iterator[Finding]:
    """Report whether the quota store does what agents need."""
    if not is_shared(context.settings.quota_store):
        yield skipped("quota store", "Quotas are counted separately in each process.")
        return
    from otel_limits.quotas.store import StoreError

    place = _place(context.settings)
    try:
        with closing(open_shared_store(place)) as opened:
            problem = version_problem(opened)
            seconds = 0.0 if problem else _round_trip(opened)
    except StoreError as error:
        yield fail(
            "quota store",
            f"Unavailable: {str(error).rstrip('.')}.",
            "Check OTEL_LIMITS_QUOTA_STORE, and that its user can write keys and run scripts.",
        )
        return
    text = f"Round trip: {seconds * 1000:.1f} ms (timeout: {place.timeout * 1000:.0f} ms)."
    if problem:
        yield fail("quota store", f"Unsupported: {problem}")
    elif seconds > place.timeout / 2:
        advice = "Move the store closer, or calls will often time out."
        yield fail("quota store", text, advice)
    else:
        yield ok("quota store", text)


def _place(settings: Settings) -> StorePlace:
    from otel_limits.quotas.store import StorePlace

    return StorePlace(settings.quota_store, settings.quota_store_timeout, settings.quota_namespace)


def _round_trip(store: SharedStore) -> float:
    """Run the operations that agents need; return the median round trip in seconds."""
    from otel_limits.quotas.store import Count
    from otel_limits.quotas.windows import Window

    # A key that is not in use. Reading it runs a script and writes nothing.
    unused = Count("otel-limits doctor", "0" * 16, Window(0, 1), "tokens")
    store.check()
    store.look([(unused, 0)])
    seconds = []
    for _ in range(ROUND_TRIPS):
        begin = time.perf_counter()
        store.now()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[ROUND_TRIPS // 2]


def permissions(context: Context) -> Iterator[Finding]:
    """Report a quota store that is too old, or whose user lacks permissions."""
    has_quotas = context.document.quotas and not context.reading.mistakes
    if not (has_quotas and is_shared(context.settings.quota_store)):
        return
    from otel_limits.quotas.store import Diagnoses, StoreAuthenticationError, StoreError

    variable = "OTEL_LIMITS_QUOTA_STORE"
    with closing(open_shared_store(_place(context.settings))) as opened:
        try:
            missing = opened.missing_rights() if isinstance(opened, Diagnoses) else []
            problem = version_problem(opened)
        except StoreAuthenticationError as error:
            sentence = f"authentication failed ({redact_value(str(error))})"
            yield fail("permissions", f"{variable}: {sentence}. Check its user and password.")
            return
        except StoreError as error:
            sentence = f"Quota store unavailable ({error}); permissions not tested."
            yield warn("permissions", sentence)
            return
        try:
            # It may be full, or a read-only replica.
            if not missing:
                opened.check()
        except StoreError as error:
            sentence = "Until it is writable, each quota follows its on_store_error"
            yield warn("permissions", f"Cannot write to the quota store ({error}). {sentence}.")
    rule = f"Run on the server: ACL SETUSER <user> {' '.join(missing)}"
    # Quotas work without these.
    is_optional = all(each == "+subscribe" or each.startswith("&") for each in missing)
    if missing and is_optional:
        sentence = "cannot subscribe; polling once a second for kills and freed quota"
        yield warn("permissions", f"{variable}: {sentence}. {rule}")
    if problem:
        yield fail("permissions", f"{variable}: {problem}")
    if not is_optional:
        yield fail("permissions", f"{variable}: its user lacks permissions. {rule}")


# --- OTLP endpoints -------------------------------------------------------------------------------

PATIENCE_SECONDS: Final = 3.0

SIGNALS: Final = ("traces", "metrics", "logs")

PORTS: Final[Mapping[str, int]] = {"grpc": 4317, "http/protobuf": 4318}
"""Default ports.
<https://opentelemetry.io/docs/specs/otel/protocol/exporter/>"""


def examine_collectors(context: Context) -> Iterator[Finding]:
    """Send one empty request to each endpoint in the variables, which the exporters also read."""
    environ = context.environ
    # Each signal can have its own protocol and endpoint.
    protocols = {signal: otlp_protocol(environ, signal) for signal in SIGNALS}
    wanted = {signal: protocol for signal, protocol in protocols.items() if protocol}
    files = [name for name in CONFIGURATION_FILES if environ.get(name)]
    for name in files:
        yield skipped("otlp", f"The exporters in the file of {name} are not tested.")
    if not wanted and not files:
        yield skipped("otlp", "OTEL_EXPORTER_OTLP_* is not set.")
    for package in sorted(set(map(_package, wanted.values()))):
        if not _is_installed(package):
            yield fail("otlp", f"{package} is not installed.", install_command("otlp"))
    endpoints: dict[tuple[str, int], list[str]] = {}
    for signal, protocol in wanted.items():
        endpoints.setdefault(_endpoint(environ, signal, protocol), []).append(signal)
    for endpoint, signals in endpoints.items():
        yield _check(endpoint, signals, wanted)


def _package(protocol: str) -> str:
    return f"opentelemetry.exporter.otlp.proto.{'grpc' if protocol == 'grpc' else 'http'}"


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        # `find_spec` imports the parent packages.
        return False


def _endpoint(environ: Mapping[str, str], signal: str, protocol: str) -> tuple[str, int]:
    """Return the host and port of an exporter."""
    named = environ.get(f"{OTLP_PREFIX}{signal.upper()}_ENDPOINT") or environ.get(
        f"{OTLP_PREFIX}ENDPOINT"
    )
    default = PORTS.get(protocol, PORTS["http/protobuf"])
    # The exporters' default is a collector on this machine.
    if not named:
        return "localhost", default
    try:
        parts = urlsplit(named if "://" in named else f"//{named}")
        port = parts.port
    except ValueError:
        # `_check` reports it.
        return "", 0
    if port is None and protocol != "grpc":
        port = {"http": 80, "https": 443}.get(parts.scheme)
    return parts.hostname or "", port or default


def _check(
    endpoint: tuple[str, int], signals: Sequence[str], protocols: Mapping[str, str]
) -> Finding:
    host, port = endpoint
    named = ", ".join(signals)
    shown = f"{redact_value(host)} port {port} ({named})"
    advice = "Start the collector, or set OTEL_EXPORTER_OTLP_ENDPOINT."
    if not host:
        return fail("otlp", f"The endpoint for {named} is not a valid URL.", advice)
    try:
        # Without the exporters, which retry and don't report why a connection failed.
        socket.create_connection(endpoint, PATIENCE_SECONDS).close()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        return fail("otlp", f"{shown} is unavailable: {reason}.", advice)
    for signal in signals:
        if _is_installed(_package(protocols[signal])) and not _accepts(signal, protocols[signal]):
            advice = "Check protocol, path, headers and certificates of OTEL_EXPORTER_OTLP_*."
            return fail("otlp", f"{shown} rejects {signal}.", advice)
    return ok("otlp", f"{shown} accepts exports.")


def _accepts(signal: str, protocol: str) -> bool:
    """Send an empty request with an exporter; return whether it was accepted.

    Collectors accept such a request: <https://opentelemetry.io/docs/specs/otlp/>, "the server
    SHOULD respond with success".
    """
    from otel_limits.otel.export import probe_endpoint

    logging.disable()  # exporters log answers, which may quote a header
    # Another client would not have the exporters' headers, certificates and bugs.
    try:
        return probe_endpoint(signal, protocol, timeout=PATIENCE_SECONDS)
    except Exception:  # noqa: BLE001  settings may cause any exception
        return False
    finally:
        logging.disable(logging.NOTSET)
