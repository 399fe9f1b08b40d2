"""What a policy file can say, and what follows from one version of it for an agent or a model.

What a plugin sets wins over the file, and the file over `enable()` and the environment, cap by cap.
Within the file an agent's own value wins over the defaults, and where several globs fit an
agent's name, that of the most specific one; of two that are equally specific the later one wins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.labels import Names, matching, specificity
from otel_limits.core.limits import LIMIT_NAMES, TREE_PREFIX, Limits
from otel_limits.core.origins import file_name
from otel_limits.settings.table import POLICY_FIELDS, Setting

if TYPE_CHECKING:
    from otel_limits.core.policy import Policy
    from otel_limits.core.pricing import PriceOverride

AGENT_SETTINGS: Final[Mapping[str, Setting]] = {
    # Tools are exempted by name, under `tools`.
    name: setting
    for name, setting in POLICY_FIELDS.items()
    if name != "exempt_tools"
}
"""What can be set for an agent besides its caps; each is named as in the environment."""

SECTION_KEYS: Final = ("limits", "tree", *AGENT_SETTINGS)
"""What can be said about all agents, or about some."""

TIERED_PRICES: Final[Mapping[str, str]] = {
    "input": "USD per million input tokens.",
    "output": "USD per million output tokens.",
    "cache_read": "USD per million input tokens read from a cache; unset, they cost as input.",
    "cache_write": "USD per million input tokens written to a cache; unset, they cost as input.",
    "cache_write_1h": "USD per million input tokens written to a cache for an hour.",
    "input_audio": "USD per million input tokens of audio.",
    "output_audio": "USD per million output tokens of audio.",
}
FEES: Final[Mapping[str, str]] = {
    "per_request": "USD for each model call, on top of its tokens.",
    "web_search": "USD for each search of the web that the vendor makes for the model.",
}
PRICES: Final[Mapping[str, str]] = {**TIERED_PRICES, **FEES}
REQUIRED_PRICES: Final = ("input", "output")

TIERS: Final = "tiers"
TIERS_HELP: Final = (
    "What a call costs whose prompt is longer; of the tiers that it passes, the highest one holds "
    "for the whole call."
)
ABOVE: Final = "above"
ABOVE_HELP: Final = "Input tokens, cached ones included, that a prompt has to be longer than."

MODEL_KEYS: Final[Mapping[str, str]] = {
    "price": "What a call of the models costs.",
    "provider": "Who sells them, such as azure; unset, the entry holds for every seller.",
    "local": "Whether they run on a machine of your own, so that a call costs nothing.",
}

ROOT: Final[Mapping[str, str]] = {
    "defaults": "What applies to every agent, unless something more specific is said below.",
    "agents": "What applies to the agents whose name fits a glob; the most specific glob wins, "
    "value by value.",
    "models": "Prices of the models whose id fits a glob; the most specific glob wins.",
    "tools": "What applies to the tools whose name fits a glob; the most specific glob wins.",
    "quotas": "Budgets over a time window, shared by many invocations.",
}

EXEMPT_HELP: Final = "Whether loop limits ignore the tool, as befits one that is meant to poll."

PER_TOOL: Final = "max_calls_per_tool"


@dataclass(frozen=True, slots=True)
class Entry:
    """One value of the file."""

    value: Any
    line: int


@dataclass(frozen=True, slots=True)
class Row:
    """One effective setting, for those who ask where it comes from."""

    name: str
    value: Any
    source: str
    """`default`, `environment`, a preset, or `policy limits.yaml:12`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One version of a policy file. Its values are named as the settings of the environment."""

    path: str = ""
    defaults: Mapping[str, Entry] = field(default_factory=dict)
    agents: Mapping[str, Mapping[str, Entry]] = field(default_factory=dict)
    """By glob on the agent's name."""
    prices: Mapping[str, Entry] = field(default_factory=dict)
    """By glob on the model's id; each holds an `Offer`."""
    exemptions: Mapping[str, Entry] = field(default_factory=dict)
    """By glob on the tool's name; each holds a boolean."""
    quotas: Mapping[str, Entry] = field(default_factory=dict)
    """By name; each holds a `Quota`."""

    @property
    def names(self) -> Names:
        """Every name of an agent, a model or a tool that stands here without a glob."""
        caps = _without_prefix(self.defaults, PER_TOOL + ".")
        return Names(
            agents=_without_globs(self.agents),
            models=_without_globs(self.prices),
            tools=_without_globs(self.exemptions) | frozenset(caps),
        )

    def entries(self, agent: str | None) -> dict[str, Entry]:
        """Every value that applies to `agent`; without a name those that apply to all."""
        entries = dict(self.defaults)
        # From the least specific to the most, so that the last word is that of the closest.
        for glob in () if agent is None else matching(self.agents, agent):
            entries.update(self.agents[glob])
        return entries

    def effective(self, agent: str, base: Policy) -> Policy:
        """What applies to `agent`, with `base` for all that the file leaves open."""
        if self is NO_DOCUMENT:
            return base
        entries = self.entries(agent)
        values = {name: entry.value for name, entry in entries.items()}
        file = file_name(self.path)
        lines = {name: f"{file}:{entry.line}" for name, entry in entries.items()}
        exempt = frozenset(glob for glob, entry in self.exemptions.items() if entry.value)
        # `exempt: false` is kept, too: it takes back the exemption that a wider glob gives.
        watched = frozenset(self.exemptions) - exempt
        return dataclasses.replace(
            base,
            limits=_limits(values).merged_over(base.limits),
            tree=_limits(_without_prefix(values, TREE_PREFIX)).merged_over(base.tree),
            # The file wins over the environment in both directions: `exempt: false` takes an
            # exemption back.
            exempt_tools=(base.exempt_tools - watched) | exempt,
            watched_tools=(base.watched_tools - exempt) | watched,
            origins={**base.origins, **lines},
            **{name: value for name, value in values.items() if name in AGENT_SETTINGS},
        )

    def price_list(self) -> dict[str, PriceOverride]:
        """Every price by its glob, the most specific first: the first that fits is the one."""
        ranked = sorted(self.prices, key=specificity)
        return {glob: self.prices[glob].value for glob in reversed(ranked)}

    def rows(
        self, values: Mapping[str, Any], sources: Mapping[str, str], agent: str | None = None
    ) -> list[Row]:
        """Every setting that is effective for `agent`, and where it comes from.

        Args:
            values: What was read from the environment, by setting.
            sources: Where each of them came from.
            agent: Name of the agent; without one the rows are those of an agent of no name.
        """
        entries = self.entries(agent) | self._keyed()
        rows = {name: Row(name, value, sources[name]) for name, value in values.items()}
        # Caps of single tools are rows of their own, since each can come from another line.
        if any(name.startswith(PER_TOOL + ".") for name in entries):
            caps = rows.pop(PER_TOOL)
            for tool, cap in (caps.value or {}).items():
                rows[f"{PER_TOOL}.{tool}"] = Row(f"{PER_TOOL}.{tool}", cap, caps.source)
        for name, entry in entries.items():
            rows[name] = Row(name, entry.value, f"policy {self.path}:{entry.line}")
        return list(rows.values())

    def _keyed(self) -> dict[str, Entry]:
        """What the file says about models and tools, by the key that says it."""
        # By the key that the file has, so that whoever looks for the line finds it.
        prices = {
            f'models["{glob}"].{"local" if entry.value.price is None else "price"}': Entry(
                _written(entry.value), entry.line
            )
            for glob, entry in self.prices.items()
        }
        exempt = {f'tools["{glob}"].exempt': entry for glob, entry in self.exemptions.items()}
        quotas = {f'quotas["{name}"]': entry for name, entry in self.quotas.items()}
        return prices | exempt | quotas


NO_DOCUMENT: Final = Document()


def _limits(values: Mapping[str, Any]) -> Limits:
    caps = {name: value for name, value in values.items() if name in LIMIT_NAMES}
    per_tool = _without_prefix(values, PER_TOOL + ".")
    return Limits(**caps, max_calls_per_tool=per_tool or None)


def _without_globs(names: Iterable[str]) -> frozenset[str]:
    return frozenset(name for name in names if specificity(name)[0])


def _written(offer: PriceOverride) -> Any:
    """Return what a file says of a model, where it says something."""
    price = offer.price
    if price is None:
        return True
    written: dict[str, Any] = _given(price, TIERED_PRICES) | _given(price, FEES)
    if not price.per_request:  # as nobody has to say
        del written["per_request"]
    if price.tiers:
        written[TIERS] = [
            {ABOVE: tier.above, **_given(tier, TIERED_PRICES)} for tier in price.tiers
        ]
    if offer.provider is not None:
        written["provider"] = offer.provider
    return written


def _given(part: object, names: Iterable[str]) -> dict[str, Decimal]:
    found = {name: getattr(part, name) for name in names}
    return {name: amount for name, amount in found.items() if amount is not None}


def _without_prefix(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): value
        for name, value in values.items()
        if name.startswith(prefix)
    }
