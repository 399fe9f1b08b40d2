"""The changes by which a new version of the policy file loosens limits."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.comparisons import (
    NO_CAP,
    NOT_COMPARABLE,
    change,
    changed,
    excepted,
    higher,
)
from otel_limits.core.limits import CONVERSATION_PREFIX, TREE_PREFIX, caps_by_name
from otel_limits.core.policy import COMPARED, COST, HALTS_LESS
from otel_limits.core.secrets import quote_value, redact_value
from otel_limits.settings.policy.document import AGENT_SETTINGS
from otel_limits.settings.policy.patterns import Version, differences

if TYPE_CHECKING:
    from otel_limits.core.comparisons import IsLooser
    from otel_limits.core.policy import Policy
    from otel_limits.quotas.quota import Quota
    from otel_limits.settings.policy.document import Document
    from otel_limits.settings.policy.patterns import Globs

USD: Final = "usd"
"""Unit of the quotas that depend on prices."""

COSTS: Final = tuple(prefix + COST for prefix in ("", TREE_PREFIX, CONVERSATION_PREFIX))
"""Limits that depend on prices."""

NO_CAPS: Final = Version({}, NO_CAP)


def loosened(before: Document, after: Document, base: Policy) -> tuple[str, ...]:
    """Return what is looser in a new version, or may be: by agent, tool, quota and model."""
    old, new = (_by_setting(document, base) for document in (before, after))
    return (
        *_of_agents(old, new),
        *_of_tools(before, after, base, old, new),
        *_of_quotas(before, after, old["action"], new["action"]),
        *_of_prices(before, after, old),
    )


# --- agents ---------------------------------------------------------------------------------------


def _by_setting(document: Document, base: Policy) -> dict[str, Version]:
    """Return the values of caps, and of other settings that can loosen limits, by agent."""
    defaults = {
        **caps_by_name(base.limits),
        **_with_prefix(TREE_PREFIX, caps_by_name(base.tree)),
        **_with_prefix(CONVERSATION_PREFIX, caps_by_name(base.conversation)),
        **{name: getattr(base, name) for name in COMPARED},
        **{name: entry.value for name, entry in document.defaults.items()},
    }
    sections: dict[str, dict[str, Any]] = {}
    for glob, section in document.agents.items():
        for name, entry in section.items():
            sections.setdefault(name, {})[glob] = _value(name, entry.value)
    return {
        name: Version(sections.get(name, {}), _value(name, defaults.get(name)))
        for name in sorted({**defaults, **sections}, key=COMPARED.__contains__)
        if name in COMPARED or name not in AGENT_SETTINGS
    }


def _with_prefix(prefix: str, caps: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + name: cap for name, cap in caps.items()}


def _value(name: str, value: Any) -> Any:
    """Return a value to compare; a cap of 0 is none."""
    return value if name in COMPARED else value or NO_CAP


def _of_agents(before: Mapping[str, Version], after: Mapping[str, Version]) -> Iterator[str]:
    """Yield for which agents a setting is looser; once if it is for all of them."""
    for name, old in before.items():
        new = after.get(name, NO_CAPS)
        found = _phrases(name, old, new, COMPARED.get(name, higher))
        for phrase, places in found.items():
            if () in places and all((glob,) in places for glob in (*old.values, *new.values)):
                yield f"all agents: {phrase}"
            else:
                yield from (f"{_agents(globs)}: {phrase}" for globs in places)


def _phrases(
    name: str, old: Version, new: Version, is_looser: IsLooser
) -> dict[str, dict[Globs, None]]:
    """Return each change of a setting that is looser, or may be, and where it applies."""
    found: dict[str, dict[Globs, None]] = {}
    for each in differences(old, new, is_looser):
        if each.globs is None:
            found[name + NOT_COMPARABLE] = {None: None}
            continue
        for phrase in change(name, each.old, each.new, is_looser):
            places = found.setdefault(phrase, {})
            # Two globs say nothing new if one of them alone has the same change.
            if not any((glob,) in places for glob in each.globs):
                places[each.globs] = None
    return found


def _agents(globs: Globs) -> str:
    match globs:
        case None:
            return "agents that match several patterns"
        case ():
            return "all other agents"
        case (glob,):
            return f"agent {quote_value(glob)}"
    return "agents that match " + " and ".join(map(quote_value, globs))


# --- tools, quotas and prices ---------------------------------------------------------------------


def _of_tools(
    before: Document,
    after: Document,
    base: Policy,
    old: Mapping[str, Version],
    new: Mapping[str, Version],
) -> Iterator[str]:
    """Yield which tools are less limited."""
    exempt = [Version(_exempt(document, base), default=False) for document in (before, after)]
    yield from _named("tools", ".exempt", exempt, excepted)
    for key, setting, is_looser in (
        ("action", "tool_action", HALTS_LESS),
        ("failures", "tool_failures", changed),
    ):
        versions = [Version(document.by_tool(key), None) for document in (before, after)]
        # Tools without a value have that of each agent.
        inherited = old[setting].distinct, new[setting].distinct
        yield from _named("tools", f".{key}", versions, _for_some(is_looser, *inherited))


def _exempt(document: Document, base: Policy) -> dict[str, bool]:
    """Return whether tools are exempt by name or glob; of two equally specific ones, `False`."""
    values = {
        **dict.fromkeys(base.exempt_tools, True),
        **document.by_tool("exempt"),
    }
    return dict(sorted(values.items(), key=lambda each: not each[1]))


def _for_some(is_looser: IsLooser, former: list[Any], current: list[Any]) -> IsLooser:
    """Compare values of which an unset one is any of those of the agents."""

    def compare(old: Any, new: Any) -> bool | None:
        if old is None and new is None:
            return False
        verdicts = {
            is_looser(*pair)
            for pair in itertools.product(
                former if old is None else [old], current if new is None else [new]
            )
        }
        return True if True in verdicts else None if None in verdicts else False

    return compare


def _named(kind: str, key: str, versions: Iterable[Version], is_looser: IsLooser) -> Iterator[str]:
    """Yield what is looser for tools or models, with their place in the file."""
    old, new = versions
    for phrase, places in _phrases(key, old, new, is_looser).items():
        for globs in places:
            place = "several patterns" if globs is None else " and ".join(map(_quoted, globs))
            yield f"{kind}[{place}]{phrase}"


def _quoted(glob: str) -> str:
    return f'"{redact_value(glob)}"'


def _of_quotas(before: Document, after: Document, old: Version, new: Version) -> Iterator[str]:
    """Yield which quotas admit more; without an action, they have that of each agent."""
    is_looser = _for_some(COMPARED["action"], old.distinct, new.distinct)
    for name, entry in before.quotas.items():
        former: Quota = entry.value
        if name not in after.quotas:
            yield f"quota {quote_value(name)}: {former} -> no quota"
            continue
        quota: Quota = after.quotas[name].value
        for phrase in dict.fromkeys(quota.loosened(former)):
            yield f"quota {quote_value(name)}: {phrase}"
        for phrase in change("action", former.action, quota.action, is_looser):
            yield f"quota {quote_value(name)}: {phrase}"


def _of_prices(before: Document, after: Document, settings: Mapping[str, Version]) -> Iterator[str]:
    """Yield prices that count less against limits in USD, if there are any."""
    if not any(entry.value.unit == USD for entry in before.quotas.values()) and not any(
        cap != NO_CAP
        for name in COSTS
        if name in settings
        for cap in (settings[name].default, *settings[name].values.values())
    ):
        return
    entries = [entry.value for entry in (*before.prices.values(), *after.prices.values())]
    vendors = dict.fromkeys(("", *(each.provider for each in entries if each.provider)))
    versions = ([_prices(document, vendor) for document in (before, after)] for vendor in vendors)
    phrases = (_named("models", "", each, _is_cheaper) for each in versions)
    yield from dict.fromkeys(itertools.chain.from_iterable(phrases))


def _prices(document: Document, vendor: str) -> Version:
    """Return the prices as written that apply to models of a vendor, by model."""
    return Version(
        {
            glob: {key.rpartition(".")[2]: written.value}
            for (glob, entry), (key, written) in zip(
                document.prices.items(), document.written_prices.items(), strict=True
            )
            if entry.value.holds_for(vendor)
        },
        None,
    )


def _is_cheaper(old: Any, new: Any) -> bool | None:
    """Compare prices of the file; with those of the price list, there is nothing to compare."""
    if old == new:
        return False
    former, current = ((each or {}).get("price") for each in (old, new))
    if not isinstance(former, Mapping) or not isinstance(current, Mapping):
        return None
    if former.keys() != current.keys():
        return None
    differing = [(former[key], current[key]) for key in former if former[key] != current[key]]
    if not all(isinstance(each, int | Decimal) for pair in differing for each in pair):
        return None
    return any(rate < earlier for earlier, rate in differing)
