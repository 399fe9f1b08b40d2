"""Reads a policy file: its YAML with line numbers, its keys, and all mistakes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Annotated, Any, Final, TypeAlias

import yaml
from pydantic import ConfigDict, Field, create_model, field_validator, model_validator

from otel_limits.core.catalogue import is_sold, nearest_listed
from otel_limits.core.failures import TOOL_FAILURES
from otel_limits.core.file_parts import KeyPath, Of, Part, mistakes_in, optional
from otel_limits.core.limits import (
    CONVERSATION,
    LIMIT_NAMES,
    LIMITS,
    SHARED_LIMITS,
    TREE,
    file_name,
)
from otel_limits.core.policy import COST, TOOL_ACTION
from otel_limits.core.price import TIERED, Price, PriceTier
from otel_limits.core.price_lookup import PriceOverride, Prices, missing_prices
from otel_limits.core.secrets import quote_value, redact_message, redact_value
from otel_limits.core.values import (
    BOOLEAN,
    FEE,
    PRICE,
    WHOLE_NUMBER,
    Kind,
    MappingKind,
    TextKind,
    item_of,
)
from otel_limits.settings.policy.document import AGENT_SETTINGS, NO_DOCUMENT, Document, Entry

# --- agents: keys of the file, what they may contain, and what they are for -----------------------


def _type_of(kind: Kind[Any]) -> Any:
    """Return a kind as a type; the values of a mapping are checked, and told, one by one."""
    return (
        dict[str, _type_of(kind.each)]  # type: ignore[misc]
        if isinstance(kind, MappingKind)
        else Annotated[Any, Of(kind)]
    )


def _part(name: str, keys: Mapping[str, tuple[Any, ...]]) -> type[Part]:
    """Create a model from the type and the help of each key, and an example of a mapping."""
    fields: dict[str, Any] = {
        key: (kind, optional(text, **({"examples": list(examples)} if examples else {})))
        for key, (kind, text, *examples) in keys.items()
    }
    return create_model(name, __base__=Part, **fields)


def _caps(name: str, limits: Iterable[str]) -> type[Part]:
    return _part(name, {each: _key_of(LIMITS[each].kind, LIMITS[each].help) for each in limits})


def _key_of(kind: Kind[Any], text: str) -> tuple[Any, ...]:
    examples = [kind.written_example] if isinstance(kind, MappingKind) else []
    return _type_of(kind), text, *examples


EXAMPLE: Final = {"max_turns": 30}
"""Of limits."""


# Made from the tables of limits and settings, which variables and options are made from as well.
Section: Final = _part(
    "Section",
    {
        "limits": (_caps("Limits", LIMIT_NAMES), "Limits per invocation.", EXAMPLE),
        "tree": (
            _caps("Tree", SHARED_LIMITS[TREE]),
            "Limits across a budget tree: an invocation and all agents it starts.",
            EXAMPLE,
        ),
        "conversation": (
            _caps("Conversation", SHARED_LIMITS[CONVERSATION]),
            "Limits per conversation: all invocations of a thread or session.",
            EXAMPLE,
        ),
        **{name: _key_of(each.kind, each.help) for name, each in AGENT_SETTINGS.items()},
    },
)


# --- models and their prices ----------------------------------------------------------------------

Rate: TypeAlias = Annotated[Any, Of(PRICE)]
Fee: TypeAlias = Annotated[Any, Of(FEE)]


class WrittenRates(Part):
    """Rates that can be higher for long prompts."""

    input: Rate = optional("USD per million input tokens.")
    output: Rate = optional("USD per million output tokens.")
    cache_read: Rate = optional("USD per million input tokens read from a cache. Unset: as input.")
    cache_write: Rate = optional(
        "USD per million input tokens written to a cache. Unset: as input."
    )
    cache_write_1h: Rate = optional("USD per million input tokens written to a cache for an hour.")
    input_audio: Rate = optional("USD per million input tokens of audio.")
    output_audio: Rate = optional("USD per million output tokens of audio.")


class WrittenTier(WrittenRates):
    """Rates above a number of tokens."""

    above: Annotated[Any, Of(WHOLE_NUMBER)] = Field(
        description="Input tokens, including cached ones, that a prompt must exceed."
    )

    @model_validator(mode="after")
    def _has_a_price(self) -> WrittenTier:
        if self.model_fields_set.isdisjoint(TIERED):
            raise ValueError(" needs a price, such as input.")
        return self


class WrittenPrice(WrittenRates):
    """The price of a model."""

    input: Rate = Field(description="USD per million input tokens.")
    output: Rate = Field(description="USD per million output tokens.")
    per_request: Fee = optional("USD per model call, in addition to its tokens.")
    web_search: Fee = optional("USD per web search by the vendor.")
    tiers: list[WrittenTier] = Field(
        [],
        description="Prices of calls with long prompts. The highest tier that a prompt exceeds "
        "applies to the whole call.",
    )

    @field_validator("tiers")
    @classmethod
    def _differ(cls, tiers: list[WrittenTier]) -> list[WrittenTier]:
        # Otherwise the price would depend on the order of tiers.
        seen = [tier.above for tier in tiers]
        for number, above in enumerate(seen):
            if above in seen[:number]:
                raise ValueError(f"[{number}].above {above} is also used by another tier.")
        return tiers

    def price(self) -> Price:
        """Return the price."""
        tiers = tuple(PriceTier(**tier.given()) for tier in self.tiers)
        return Price(**self.given() | {"tiers": tiers})


def _listed(name: str, text: str) -> str:
    """Return the name of a model on the price list, if there is one."""
    prices = Prices()
    if not prices.has_list or prices.find(text) is not None or is_sold(text):
        return text
    near = ", ".join(nearest_listed(text))
    raise ValueError(
        f"{name} must be a model on the price list, got {quote_value(text)}. "
        + (f"Did you mean {near}?" if near else "Write it as VENDOR/MODEL, e.g. azure/gpt-4o.")
    )


def _vendor(name: str, text: str) -> str:
    if not text:
        raise ValueError(f"{name} must not be empty.")
    return text


class WrittenModel(Part):
    """The price of some models."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"anyOf": [{"required": ["price"]}, {"required": ["as"]}]},
                {"required": ["local"], "properties": {"local": {"const": True}}},
            ]
        }
    )

    price: WrittenPrice = optional("Price of the models.", examples=[{"input": 1, "output": 4}])
    priced_as: Annotated[Any, Of(TextKind(read=_listed))] = optional(
        "Model on the price list whose price applies, e.g. azure/gpt-4o. Unset: the model ID.",
        alias="as",
    )
    provider: Annotated[Any, Of(TextKind(read=_vendor))] = optional(
        "Vendor, e.g. azure. Unset: the entry applies to all vendors."
    )
    local: Annotated[Any, Of(BOOLEAN)] = optional(
        "Whether the models run on your own machines, so calls are free."
    )

    @model_validator(mode="after")
    def _has_one_price(self) -> WrittenModel:
        if bool(self.local) != self.model_fields_set.isdisjoint({"price", "priced_as"}):
            raise ValueError(" needs a price, as, or local: true.")
        return self

    def override(self) -> PriceOverride:
        """Return how the models are priced."""
        price = self.price.price() if "price" in self.model_fields_set else None
        return PriceOverride(price=price, priced_as=self.priced_as, provider=self.provider)


# --- tools, and the whole file --------------------------------------------------------------------


class WrittenTool(Part):
    """How limits treat a tool."""

    exempt: Annotated[Any, Of(BOOLEAN)] = optional(
        "Whether loop limits ignore the tool, e.g. one that polls."
    )
    action: Annotated[Any, Of(TOOL_ACTION)] = optional(
        "Action at its cap of max_calls_per_tool: refuse or halt. Unset: as tool_action."
    )
    failures: Annotated[Any, Of(TOOL_FAILURES)] = optional(
        "Its results that are failures: text, marked or patterns. Unset: as tool_failures."
    )


File: Final = _part(
    "File",
    {
        "defaults": (
            Section,
            "Settings of all agents, unless overridden below.",
            {"limits": EXAMPLE},
        ),
        "agents": (
            dict[str, Section],  # type: ignore[valid-type]
            "Settings by agent name or glob. The most specific glob applies, value by value.",
            {"researcher": {"limits": EXAMPLE}},
        ),
        "models": (
            dict[str, WrittenModel],
            "Prices by model ID or glob. The most specific glob applies.",
            {"my-model": {"price": {"input": 1, "output": 4}}},
        ),
        "tools": (
            dict[str, WrittenTool],
            "Settings by tool name or glob. The most specific glob applies.",
            {"poll_*": {"exempt": True}},
        ),
        # Read by `otel_limits.quotas.section`, which most files don't need.
        "quotas": (Any, "Budgets per time window, shared by many invocations."),
    },
)


# --- YAML as values with line numbers -------------------------------------------------------------
# Only syntax on which all YAML parsers agree is interpreted: `true` and `false` are booleans,
# decimal numbers are numbers (exact ones, if they have a fraction), everything else is text. So
# `no` is a name, `010` is not an octal number and `1:30` is not a duration.

Value: TypeAlias = "bool | int | Decimal | str | tuple[Node, ...] | Mapping[str, Node] | None"

DIGITS: Final = r"(0|[1-9](_?[0-9]){0,29})"
WHOLE: Final = re.compile(rf"[-+]?{DIGITS}")
FRACTION: Final = re.compile(
    rf"[-+]?({DIGITS}(\.[0-9]{{0,30}})?|\.[0-9]{{1,30}})([eE][-+]?[0-9]{{1,2}})?"
)
"""Longer numbers are text: no setting needs them, and huge ones are slow."""
LONGEST_SHOWN: Final = 80
NOTHING: Final = ("", "~", "null", "Null", "NULL")
BOOLEANS: Final = {"true": True, "True": True, "TRUE": True} | dict.fromkeys(
    ("false", "False", "FALSE"), False
)
SURROGATE: Final = re.compile("[\ud800-\udfff]")
"""Half of a character, which JSON can write but UTF-8 cannot."""
MAX_NODES: Final = 100_000
"""Maximum values of a file, counting aliases, which can double with every line."""
MAX_DEPTH: Final = 100
"""Maximum nesting of brackets, which PyYAML takes long to scan."""
TAGS: Final = frozenset(
    "tag:yaml.org,2002:" + kind
    for kind in ("bool", "float", "int", "map", "merge", "null", "seq", "str", "timestamp", "value")
)
"""The tags of plain YAML. Any other tag would create an object."""


@dataclass(frozen=True, slots=True)
class Node:
    """One value of a file."""

    value: Value
    line: int
    """The line where it starts, with its key if it has one; counted from 1."""
    shown: str
    """Its text in messages: as written, or `a mapping`."""

    def plain(self, done: dict[int, Any] | None = None) -> Any:
        """Return the value without lines.

        Values in `done` are reused: aliases can nest deeper than Python can call.
        """
        done = {} if done is None else done
        # By identity, because an alias has the same object as its anchor.
        if id(self.value) not in done:
            value: Any = self.value
            if isinstance(value, Mapping):
                value = {name: child.plain(done) for name, child in value.items()}
            elif isinstance(value, tuple):
                value = [child.plain(done) for child in value]
            done[id(self.value)] = value
        return done[id(self.value)]

    def below(self, *path: int | str) -> Node:
        """Follow keys and indexes as far as they exist."""
        node: Node = self
        for step in path:
            if isinstance(node.value, tuple) and isinstance(step, int):
                node = node.value[step]
            elif isinstance(node.value, Mapping) and step in node.value:
                node = node.value[str(step)]
            else:
                break
        return node


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake in a policy file."""

    line: int
    sentence: str


class _Loader(yaml.SafeLoader):
    """Parses YAML up to a maximum nesting of brackets."""

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        """Read an opening bracket."""
        if self.flow_level >= MAX_DEPTH:
            raise RecursionError
        super().fetch_flow_collection_start(token)


def read_yaml(text: str) -> tuple[Node, tuple[Mistake, ...]]:
    """Parse one YAML document. Invalid YAML returns an empty node and a mistake."""
    try:
        return _read_nodes(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reasons = ", ".join(filter(None, (error.context, error.problem)))
        mistake = Mistake(mark.line + 1 if mark else 1, f"Invalid YAML: {redact_message(reasons)}.")
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        mistake = Mistake(line, "The file has a character that is not allowed in YAML.")
    except RecursionError:
        mistake = Mistake(1, "The file is nested too deeply to be read.")
    return Node(None, mistake.line, "nothing"), (mistake,)


def _read_nodes(text: str) -> tuple[Node, tuple[Mistake, ...]]:
    # Composed, not loaded: only nodes have lines, and tags create no objects.
    root = yaml.compose(text, Loader=_Loader)
    if root is None:
        return Node(None, 1, "nothing"), (Mistake(1, "The file is empty."),)
    if _size(root, {}) > MAX_NODES:
        sentence = f"The file has more than {MAX_NODES:,} values, counting aliases."
        return Node(None, 1, "nothing"), (Mistake(1, sentence),)
    converter = _Converter()
    return converter.node(root), tuple(converter.mistakes)


def _size(node: yaml.Node, sizes: dict[yaml.Node, int]) -> int:
    """Count the values below a node. Aliases count each time but are visited once."""
    if node not in sizes:
        sizes[node] = 1  # an alias may refer to its own parent
        size = 1
        for part in node.value if isinstance(node, yaml.CollectionNode) else ():
            # An item of a list, or key and value of a mapping.
            below = part if isinstance(part, tuple) else (part,)
            size += sum(_size(each, sizes) for each in below)
        sizes[node] = size
    return sizes[node]


class _Converter:
    """Converts PyYAML nodes to ours, each once even if aliases repeat it."""

    def __init__(self) -> None:
        """Start without mistakes."""
        self.mistakes: list[Mistake] = []
        self._done: dict[yaml.Node, Node | None] = {}

    def node(self, node: yaml.Node) -> Node:
        """Convert a node and everything below it."""
        line = node.start_mark.line + 1
        # An alias is the same node. Converting each once keeps nested aliases ("billion laughs")
        # small.
        if node not in self._done:
            self._done[node] = None  # in progress
            self._done[node] = self._convert(node, line)
        done = self._done[node]
        if done is None:
            self.mistakes.append(Mistake(line, "An alias refers to its own parent."))
            return Node(None, line, "nothing")
        return done

    def _convert(self, node: yaml.Node, line: int) -> Node:
        if node.tag not in TAGS:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self.mistakes.append(
                Mistake(line, f"The tag {redact_value(tag)} is not allowed: plain YAML only.")
            )
            return Node(None, line, "nothing")
        if isinstance(node, yaml.MappingNode):
            return Node(self._mapping(node), line, "a mapping")
        if isinstance(node, yaml.SequenceNode):
            items = tuple(self.node(item) for item in node.value)
            return Node(items, line, _shown(items))
        assert isinstance(node, yaml.ScalarNode)
        return _scalar(node.value, line, is_quoted=node.style is not None)

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self.mistakes.append(Mistake(line, "A key must be a single word or text."))
            elif SURROGATE.search(key.value):
                sentence = f"The key {quote_value(key.value)} contains half a character."
                self.mistakes.append(Mistake(line, sentence))
            # YAML 1.2 requires unique keys (3.2.1.3), but PyYAML silently uses the last one.
            elif key.value in entries:
                first = entries[key.value].line
                self.mistakes.append(
                    Mistake(
                        line,
                        f"Duplicate key {quote_value(key.value)}, first on line {first}.",
                    )
                )
            else:
                # The line of the key, not of the block after it.
                entries[key.value] = dataclasses.replace(self.node(value), line=line)
        return entries


def _shown(items: tuple[Node, ...]) -> str:
    # Nested lists are abbreviated, because aliases could make them arbitrarily long.
    shown = ["a list" if isinstance(item.value, tuple) else item.shown for item in items]
    text = f"[{', '.join(shown)}]"
    return text if len(text) <= LONGEST_SHOWN else "a list"


def _scalar(text: str, line: int, *, is_quoted: bool) -> Node:
    # Quoted words are always text: `"true"` and `"5"`.
    value = text if is_quoted else _unquoted(text)
    if value is None:
        return Node(None, line, "nothing")
    return Node(value, line, quote_value(value) if isinstance(value, str) else text)


def _unquoted(text: str) -> bool | int | Decimal | str | None:
    if text in NOTHING:
        return None
    if text in BOOLEANS:
        return BOOLEANS[text]
    if WHOLE.fullmatch(text):
        return int(text)
    if FRACTION.fullmatch(text):
        return Decimal(text)
    return text


# --- the document, and all mistakes ---------------------------------------------------------------


def parse(text: str, path: str) -> tuple[Document, tuple[str, ...]]:
    """Parse a policy.

    Returns:
        The document, and a sentence with file, line and key for each mistake. With a mistake, the
        document is empty: a policy is accepted or rejected as a whole.
    """
    root, mistakes = read_yaml(text)
    reader = _Reader(root, mistakes)
    # The valid parts of the YAML are checked as well, to report all mistakes together.
    document = NO_DOCUMENT if mistakes and root.value is None else reader.document(path)
    # By line, because sections are read in a different order.
    ordered = sorted(reader.mistakes, key=lambda mistake: mistake.line)
    sentences = tuple(f"{path}:{each.line}: {each.sentence}" for each in ordered)
    return (NO_DOCUMENT if sentences else document), sentences


class _Reader:
    """Reads a whole file and collects mistakes."""

    def __init__(self, root: Node, mistakes: Iterable[Mistake]) -> None:
        """Start with the mistakes in the YAML itself."""
        self._root = root
        # Collected instead of raised: fixing five mistakes must not take five attempts.
        self.mistakes = list(mistakes)

    def document(self, path: str) -> Document:
        """Read the file."""
        parts = self._valid_parts()
        document = Document(
            path=path,
            defaults=self._entries(parts.get("defaults", Section()), "defaults"),
            agents={
                glob: self._entries(section, "agents", glob)
                for glob, section in parts.get("agents", {}).items()
            },
            **self._prices(parts.get("models", {})),
            tools={
                glob: self._entries(tool, "tools", glob)
                for glob, tool in parts.get("tools", {}).items()
            },
            quotas=self._quotas(parts["quotas"], path) if "quotas" in parts else {},
        )
        self._require_prices(document)
        return document

    def _valid_parts(self) -> dict[str, Any]:
        """Return the sections of the file, without entries that contain mistakes."""
        content = self._root.plain()
        wrong = set()
        for path, sentence in mistakes_in(content, File, self._shown):
            self._refuse(sentence, *path)
            wrong.add(path[:2])
        if not isinstance(content, dict):
            return {}
        valid = {
            name: {key: entry for key, entry in part.items() if (name, key) not in wrong}
            if isinstance(part, dict)
            else part
            for name, part in content.items()
            if (name,) not in wrong
        }
        return File.model_validate(valid).given()

    def _entries(self, part: Part, *path: str) -> dict[str, Entry]:
        """Return the values of a section, named as in the environment."""
        entries: dict[str, Entry] = {}
        for name, value in part.given().items():
            if isinstance(value, Part):
                prefix = f"{name}_" if name in SHARED_LIMITS else ""
                caps = self._entries(value, *path, name)
                entries |= {prefix + cap: entry for cap, entry in caps.items()}
            elif isinstance(value, dict):
                # One entry per tool, so that sections are merged tool by tool.
                for tool, cap in value.items():
                    entries[f"{name}.{tool}"] = self._entry(cap, *path, name, tool)
            else:
                entries[name] = self._entry(value, *path, name)
        return entries

    def _prices(self, models: Mapping[str, WrittenModel]) -> dict[str, dict[str, Entry]]:
        prices, written = {}, {}
        for glob, model in models.items():
            content = self._root.below("models", glob).plain()
            key = next(key for key in ("price", "as", "local") if key in content)
            value = content[key]
            if key == "price" and model.provider:
                value = {**value, "provider": model.provider}
            prices[glob] = self._entry(model.override(), "models", glob, key)
            written[f'models["{glob}"].{key}'] = self._entry(value, "models", glob, key)
        return {"prices": prices, "written_prices": written}

    def _quotas(self, section: object, path: str) -> dict[str, Entry]:
        # Imported here, because most files don't have quotas.
        from otel_limits.quotas.section import read_quotas

        quotas = read_quotas(
            section,
            refuse=lambda path, sentence: self._refuse(sentence, "quotas", *path),
            shown=lambda path: self._shown(("quotas", *path)),
        )
        entries = {name: self._entry(quota, "quotas", name) for name, quota in quotas.items()}
        file = file_name(path)
        return {
            name: replace(entry, value=replace(entry.value, origin=f"{file}:{entry.line}"))
            for name, entry in entries.items()
        }

    def _require_prices(self, document: Document) -> None:
        """Reject cost limits if prices are not available."""
        if Prices(document.price_list()).available:
            return
        named = {item_of("agents", glob): entries for glob, entries in document.agents.items()}
        for key, entries in {"defaults": document.defaults, **named}.items():
            for part in ("limits", *SHARED_LIMITS):
                name = f"{part}_{COST}" if part in SHARED_LIMITS else COST
                if name in entries:
                    sentence = f"{key}.{part}.{COST} {missing_prices()}"
                    self.mistakes.append(Mistake(entries[name].line, sentence))
        for name, entry in document.quotas.items():
            if entry.value.unit == "usd":
                sentence = f"{item_of('quotas', name)}.usd {missing_prices()}"
                self.mistakes.append(Mistake(entry.line, sentence))

    def _shown(self, path: KeyPath) -> str:
        return self._root.below(*path).shown

    def _entry(self, value: object, *path: str) -> Entry:
        return Entry(value, self._root.below(*path).line)

    def _refuse(self, sentence: str, *path: int | str) -> None:
        self.mistakes.append(Mistake(self._root.below(*path).line, sentence))
