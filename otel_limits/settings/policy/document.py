"""The content of a policy file, and what it means for an agent or a model.

One source overrides another cap by cap, in the order that `settings` describes. If several globs
match an agent's name, their sections are merged value by value, and the most specific glob wins; of
two equally specific globs, the later one.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.labels import Names, matching, specificity
from otel_limits.core.limits import LIMIT_NAMES, LIMITS, SHARED_LIMITS, Limits, file_name
from otel_limits.core.values import FrozenDict, MappingKind
from otel_limits.settings.table import POLICY_FIELDS, Setting

if TYPE_CHECKING:
    from otel_limits.core.policy import Action, Policy
    from otel_limits.core.price_lookup import PriceOverride
    from otel_limits.quotas.quota import Quota

AGENT_SETTINGS: Final[Mapping[str, Setting]] = {
    # Tools are exempted by name, under `tools`.
    name: setting
    for name, setting in POLICY_FIELDS.items()
    if name != "exempt_tools"
}
"""Settings of an agent besides its caps, named as in the environment."""

SECTION_KEYS: Final = ("limits", *SHARED_LIMITS, *AGENT_SETTINGS)
"""Keys of a section for all agents, or for some."""

PER_TOOL: Final = tuple(
    limit.name for limit in LIMITS.values() if isinstance(limit.kind, MappingKind)
)
"""Limits with a cap for each of several tools, which files override tool by tool."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One value of the file."""

    value: Any
    line: int


@dataclass(frozen=True, slots=True)
class Row:
    """An effective setting and its source."""

    name: str
    value: Any
    source: str
    """`default`, `environment`, a preset, or `policy limits.yaml:12`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One version of a policy file, with values named as in the environment."""

    path: str = ""
    defaults: Mapping[str, Entry] = field(default_factory=dict)
    agents: Mapping[str, Mapping[str, Entry]] = field(default_factory=dict)
    """By glob of the agent name."""
    prices: Mapping[str, Entry] = field(default_factory=dict)
    """By glob of the model ID; each contains a `PriceOverride`."""
    written_prices: Mapping[str, Entry] = field(default_factory=dict)
    """The prices as written, by their key in the file."""
    tools: Mapping[str, Mapping[str, Entry]] = field(default_factory=dict)
    """By glob of the tool name, then by key."""
    quotas: Mapping[str, Entry] = field(default_factory=dict)
    """By name; each contains a `Quota`."""

    @property
    def names(self) -> Names:
        """All names of agents, models and tools in the file that are not globs."""
        sections = (self.defaults, *self.agents.values())
        caps = {
            tool
            for limit in PER_TOOL
            for section in sections
            for tool in _without_prefix(section, f"{limit}.")
        }
        return Names(
            agents=_without_globs(self.agents),
            models=_without_globs(self.prices),
            tools=_without_globs(self.tools) | caps,
        )

    def entries(self, agent: str | None) -> dict[str, Entry]:
        """Return all values that apply to `agent`; without a name, those that apply to all."""
        entries = dict(self.defaults)
        # The most specific glob is last and overrides the others.
        for glob in () if agent is None else matching(self.agents, agent):
            entries.update(self.agents[glob])
        return entries

    def effective(self, agent: str, base: Policy) -> Policy:
        """Return the policy of `agent`, with `base` for everything that the file does not set."""
        if self is NO_DOCUMENT:
            return base
        entries = self.entries(agent)
        values = {name: entry.value for name, entry in entries.items()}
        file = file_name(self.path)
        lines = {name: f"{file}:{entry.line}" for name, entry in entries.items()}
        exemptions = self.by_tool("exempt")
        exempt = frozenset(glob for glob, is_exempt in exemptions.items() if is_exempt)
        # `exempt: false` is kept as well: it overrides a less specific glob.
        watched = frozenset(exemptions) - exempt
        shared: dict[str, Any] = {
            name: _limits(_without_prefix(values, f"{name}_")).merged_over(getattr(base, name))
            for name in SHARED_LIMITS
        }
        return dataclasses.replace(
            base,
            limits=_limits(values).merged_over(base.limits),
            **shared,
            # The file overrides the environment in both directions.
            exempt_tools=(base.exempt_tools - watched) | exempt,
            watched_tools=(base.watched_tools - exempt) | watched,
            actions_by_tool=FrozenDict(self.by_tool("action")),
            failures_by_tool=FrozenDict(self.by_tool("failures")),
            quotas=self._quotas_of(agent),
            origins={**base.origins, **lines},
            **{name: value for name, value in values.items() if name in AGENT_SETTINGS},
        )

    def by_tool(self, key: str) -> dict[str, Any]:
        """Return the values of a key of tools, by glob."""
        return {glob: keys[key].value for glob, keys in self.tools.items() if key in keys}

    def policies(self, base: Policy) -> dict[str, Policy]:
        """Return the policy of each agent or glob in the file, and of all others under ``""``."""
        # The empty name matches no entry of the file, so only its defaults apply.
        return {glob: self.effective(glob, base) for glob in ("", *self.agents)}

    def _quotas_of(self, agent: str) -> frozenset[tuple[str, Action | None]]:
        """Return unit and action of each quota that covers all calls of `agent`."""
        quotas: list[Quota] = [entry.value for entry in self.quotas.values()]
        return frozenset(
            (quota.unit, quota.action)
            for quota in quotas
            if all(
                source == "agent" and fnmatch.fnmatchcase(agent, glob)
                for source, glob in quota.where
            )
        )

    def price_list(self) -> dict[str, PriceOverride]:
        """Return prices by glob, the most specific first: the first match applies."""
        ranked = sorted(self.prices, key=specificity)
        return {glob: self.prices[glob].value for glob in reversed(ranked)}

    def rows(
        self, values: Mapping[str, Any], sources: Mapping[str, str], agent: str | None = None
    ) -> list[Row]:
        """Return all effective settings of `agent` with their sources.

        Args:
            values: The settings of the environment.
            sources: Their sources.
            agent: Name of the agent. Without it, only the defaults of the file apply, and the
                section of each agent has a row.
        """
        entries = self.entries(agent) | self._keyed()
        if agent is None:
            entries |= self._sections()
        rows = {name: Row(name, value, sources[name]) for name, value in values.items()}
        # Caps per tool have separate rows, because their sources can differ.
        for limit in PER_TOOL:
            if any(name.startswith(limit + ".") for name in entries):
                caps = rows.pop(limit)
                for tool, cap in (caps.value or {}).items():
                    rows[f"{limit}.{tool}"] = Row(f"{limit}.{tool}", cap, caps.source)
        for name, entry in entries.items():
            rows[name] = Row(name, entry.value, f"policy {self.path}:{entry.line}")
        return list(rows.values())

    def _sections(self) -> dict[str, Entry]:
        """Return the sections of agents by their key in the file."""
        return {
            f'agents["{glob}"]': Entry(
                {name: entry.value for name, entry in section.items()},
                min(entry.line for entry in section.values()),
            )
            for glob, section in self.agents.items()
            if section
        }

    def _keyed(self) -> dict[str, Entry]:
        """Return the entries of models, tools and quotas by their key in the file."""
        tools = {
            f'tools["{glob}"].{key}': entry
            for glob, keys in self.tools.items()
            for key, entry in keys.items()
        }
        quotas = {f'quotas["{name}"]': entry for name, entry in self.quotas.items()}
        return {**self.written_prices, **tools, **quotas}


NO_DOCUMENT: Final = Document()


def _limits(values: Mapping[str, Any]) -> Limits:
    caps = {name: value for name, value in values.items() if name in LIMIT_NAMES}
    for limit in PER_TOOL:
        if per_tool := _without_prefix(values, limit + "."):
            caps[limit] = per_tool
    return Limits(**caps)


def _without_globs(names: Iterable[str]) -> frozenset[str]:
    return frozenset(name for name in names if specificity(name)[0])


def _without_prefix(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): value
        for name, value in values.items()
        if name.startswith(prefix)
    }
