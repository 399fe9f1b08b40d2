"""Parses a policy file and collects all mistakes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.catalogue import is_sold, nearest_listed
from otel_limits.core.limits import LIMIT_NAMES, LIMITS, TREE_LIMITS, TREE_PREFIX
from otel_limits.core.origins import file_name
from otel_limits.core.price import Price, PriceTier
from otel_limits.core.pricing import MISSING, PriceOverride, Prices
from otel_limits.core.secrets import redact_url
from otel_limits.core.values import (
    BOOLEAN,
    FEE,
    PRICE,
    TEXT,
    WHOLE_NUMBER,
    Kind,
    MappingKind,
)
from otel_limits.core.wording import closest_match
from otel_limits.settings.policy import yaml_tree
from otel_limits.settings.policy.document import (
    ABOVE,
    ABOVE_HELP,
    AGENT_SETTINGS,
    FEES,
    MODEL_KEYS,
    NO_DOCUMENT,
    PRICES,
    REQUIRED_PRICES,
    ROOT,
    SECTION_KEYS,
    TIERED_PRICES,
    TIERS,
    Document,
    Entry,
)
from otel_limits.settings.policy.yaml_tree import Mistake, Node

if TYPE_CHECKING:
    from otel_limits.core.file_parts import Path

COST: Final = "max_cost_usd"
EMPTY: Final = Node({}, 1, "a mapping")


def parse(text: str, path: str) -> tuple[Document, tuple[str, ...]]:
    """Parse a policy.

    Returns:
        The document, and a sentence with file, line and key for each mistake. With a mistake, the
        document is empty: a policy is accepted or rejected as a whole.
    """
    root, mistakes = yaml_tree.read(text)
    reader = _Reader(mistakes)
    # The valid parts of the YAML are checked as well, to report all mistakes together.
    document = NO_DOCUMENT if mistakes and root.value is None else reader.document(root, path)
    # By line, because sections are read in a different order.
    ordered = sorted(reader.mistakes, key=lambda mistake: mistake.line)
    sentences = tuple(f"{path}:{each.line}: {each.sentence}" for each in ordered)
    return (NO_DOCUMENT if sentences else document), sentences


class _Reader:
    """Reads a whole file and collects mistakes."""

    def __init__(self, mistakes: Collection[Mistake]) -> None:
        """Start with the mistakes in the YAML itself."""
        # Collected instead of raised: fixing five mistakes must not take five attempts.
        self.mistakes = list(mistakes)

    def document(self, root: Node, path: str) -> Document:
        """Read the file."""
        parts = dict(self._known(root, "", ROOT))
        document = Document(
            path=path,
            defaults=self._section(parts.get("defaults", EMPTY), "defaults"),
            agents={
                glob: self._section(node, key)
                for glob, key, node in self._named(parts.get("agents", EMPTY), "agents")
            },
            prices=self._models(parts.get("models", EMPTY)),
            exemptions=self._tools(parts.get("tools", EMPTY)),
            quotas=self._quotas(parts["quotas"], path) if "quotas" in parts else {},
        )
        self._require_prices(document)
        return document

    # --- the parts of a file ----------------------------------------------------------------------

    def _section(self, node: Node, key: str) -> dict[str, Entry]:
        """Read a section for all agents, or for some."""
        entries: dict[str, Entry] = {}
        for name, child in self._known(node, key, SECTION_KEYS):
            if name == "limits":
                entries |= self._caps(child, f"{key}.limits", LIMIT_NAMES, "")
            elif name == "tree":
                entries |= self._caps(child, f"{key}.tree", TREE_LIMITS, TREE_PREFIX)
            else:
                entries |= self._entry(name, AGENT_SETTINGS[name].kind, f"{key}.{name}", child)
        return entries

    def _caps(self, node: Node, key: str, names: Collection[str], prefix: str) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for name, child in self._known(node, key, names):
            kind = LIMITS[name].kind
            if not isinstance(kind, MappingKind):
                entries |= self._entry(prefix + name, kind, f"{key}.{name}", child)
                continue
            # One entry per tool, so that sections are merged tool by tool.
            for tool, tool_key, cap in self._named(child, f"{key}.{name}"):
                entries |= self._entry(f"{prefix}{name}.{tool}", kind.each, tool_key, cap)
        return entries

    def _models(self, node: Node) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for glob, key, model in self._named(node, "models"):
            before = len(self.mistakes)
            parts = dict(self._known(model, key, MODEL_KEYS))
            parsed: dict[str, Entry] = {}
            for name, kind in (("provider", TEXT), ("as", TEXT), ("local", BOOLEAN)):
                if name in parts:
                    parsed |= self._entry(name, kind, f"{key}.{name}", parts[name])
            price = self._price(f"{key}.price", parts["price"]) if "price" in parts else None
            is_local = "local" in parsed and parsed["local"].value
            if is_local == ("price" in parts or "as" in parts):
                self._refuse(model, f"{key} needs a price, as, or local: true.")
            if "as" in parsed and (problem := self._unlisted(parsed["as"].value)):
                self._refuse(parts["as"], f"{key}.as {problem}")
            if "provider" in parsed and not parsed["provider"].value:
                self._refuse(parts["provider"], f"{key}.provider must not be empty.")
            # A partial entry would have an unintended price.
            if len(self.mistakes) == before:
                said = {name: entry.value for name, entry in parsed.items()}
                override = PriceOverride(
                    price=price, priced_as=said.get("as"), provider=said.get("provider")
                )
                named = next(name for name in ("price", "as", "local") if name in parts)
                entries[glob] = Entry(override, parts[named].line)
        return entries

    def _unlisted(self, name: str) -> str | None:
        """Return why a model's price cannot be found on the price list."""
        prices = Prices()
        if not prices.has_list or prices.find(name) is not None or is_sold(name):
            return None
        near = ", ".join(nearest_listed(name))
        return f"must be a model on the price list, got {name!r}. " + (
            f"Did you mean {near}?" if near else "Write it as VENDOR/MODEL, e.g. azure/gpt-4o."
        )

    def _price(self, key: str, node: Node) -> Price | None:
        written = dict(self._known(node, key, (*PRICES, TIERS)))
        for name in REQUIRED_PRICES:
            if name not in written:
                self._refuse(node, f"{key} needs {name}: {PRICES[name]}")
        listed = written.pop(TIERS, None)
        tiers = [] if listed is None else list(self._tiers(f"{key}.{TIERS}", listed))
        parts = self._amounts(key, written)
        # Missing prices were reported above.
        if not parts.keys() >= set(REQUIRED_PRICES):
            return None
        return Price(**parts, tiers=tuple(tiers))

    def _tiers(self, key: str, node: Node) -> Iterator[PriceTier]:
        if not isinstance(node.value, tuple):
            self._refuse(node, f"{key} must be a list, got {node.shown}.")
            return
        seen: set[int] = set()
        for number, item in enumerate(node.value):
            where = f"{key}[{number}]"
            written = dict(self._known(item, where, (ABOVE, *TIERED_PRICES)))
            if ABOVE not in written:
                self._refuse(item, f"{where} needs {ABOVE}: {ABOVE_HELP}")
                continue
            above = self._entry(ABOVE, WHOLE_NUMBER, f"{where}.{ABOVE}", written.pop(ABOVE))
            amounts = self._amounts(where, written)
            if not written:
                self._refuse(item, f"{where} needs a price, such as input.")
            # Otherwise the price would depend on the order of tiers.
            elif above and above[ABOVE].value in seen:
                self._refuse(
                    item, f"{where}.{ABOVE} {above[ABOVE].value} is also used by another tier."
                )
            elif above:
                seen.add(above[ABOVE].value)
                yield PriceTier(above=above[ABOVE].value, **amounts)

    def _amounts(self, key: str, written: Mapping[str, Node]) -> dict[str, Any]:
        found: dict[str, Entry] = {}
        for name, child in written.items():
            found |= self._entry(name, FEE if name in FEES else PRICE, f"{key}.{name}", child)
        return {name: entry.value for name, entry in found.items()}

    def _tools(self, node: Node) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for glob, key, tool in self._named(node, "tools"):
            for name, child in self._known(tool, key, ("exempt",)):
                entries |= self._entry(glob, BOOLEAN, f"{key}.{name}", child)
        return entries

    def _require_prices(self, document: Document) -> None:
        """Reject cost limits if prices are not available."""
        if Prices(document.price_list()).available:
            return
        named = {f'agents["{glob}"]': entries for glob, entries in document.agents.items()}
        for key, entries in {"defaults": document.defaults, **named}.items():
            for part, name in (("limits", COST), ("tree", TREE_PREFIX + COST)):
                if name in entries:
                    sentence = f"{key}.{part}.{COST} {MISSING}"
                    self.mistakes.append(Mistake(entries[name].line, sentence))
        for name, entry in document.quotas.items():
            if entry.value.unit == "usd":
                sentence = f'quotas["{name}"].usd {MISSING}'
                self.mistakes.append(Mistake(entry.line, sentence))

    def _quotas(self, node: Node, path: str) -> dict[str, Entry]:
        # Imported here, because most files don't have quotas.
        from otel_limits.quotas.section import read_quotas

        quotas = read_quotas(
            _unlined(node, {}),
            refuse=lambda path, sentence: self._refuse(_below(node, path), sentence),
            shown=lambda path: _below(node, path).shown,
        )
        lines = {name: _below(node, (name,)).line for name in quotas}
        return {
            name: Entry(replace(quota, origin=f"{file_name(path)}:{lines[name]}"), lines[name])
            for name, quota in quotas.items()
        }

    # --- values -----------------------------------------------------------------------------------

    def _entry(self, name: str, kind: Kind[Any], key: str, node: Node) -> dict[str, Entry]:
        """Read one value; empty if it is invalid."""
        value: object = node.value
        if isinstance(value, tuple):
            value = [item.value for item in value]
        try:
            return {name: Entry(kind.of_value(key, value, node.shown), node.line)}
        except ValueError as error:
            self._refuse(node, str(error))
            return {}

    def _known(self, node: Node, key: str, names: Collection[str]) -> Iterator[tuple[str, Node]]:
        """Iterate over a mapping with these keys."""
        for name, child in self._mapping(node, key).items():
            if name in names:
                yield name, child
            else:
                where = f"{key}.{redact_url(name)}" if key else redact_url(name)
                self._refuse(child, f"Unknown key {where}. {_hint(name, names)}")

    def _named(self, node: Node, key: str) -> Iterator[tuple[str, str, Node]]:
        """Iterate over a mapping by name or glob."""
        for name, child in self._mapping(node, key).items():
            yield name, f'{key}["{name}"]', child

    def _mapping(self, node: Node, key: str) -> Mapping[str, Node]:
        if isinstance(node.value, Mapping):
            return node.value
        self._refuse(node, f"{key or 'The file'} must be a mapping, got {node.shown}.")
        return {}

    def _refuse(self, node: Node, sentence: str) -> None:
        self.mistakes.append(Mistake(node.line, sentence))


def _unlined(node: Node, done: dict[int, object]) -> object:
    """Return plain values without lines.

    Values in `done` are reused: nested aliases would otherwise take exponential time.
    """
    # By identity, because an alias has the same object as its anchor.
    if id(node.value) not in done:
        value: object = node.value
        if isinstance(node.value, Mapping):
            value = {name: _unlined(child, done) for name, child in node.value.items()}
        elif isinstance(node.value, tuple):
            value = [_unlined(child, done) for child in node.value]
        done[id(node.value)] = value
    return done[id(node.value)]


def _below(node: Node, path: Path) -> Node:
    """Follow keys as far as they exist."""
    for key in path:
        if not isinstance(node.value, Mapping) or key not in node.value:
            break
        node = node.value[str(key)]
    return node


def _hint(name: str, names: Collection[str]) -> str:
    near = closest_match(name, names)
    return f"Did you mean {near}?" if near else f"Valid keys: {', '.join(names)}."
