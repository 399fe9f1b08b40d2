"""The parts of a policy file as models: its keys, what they may contain, and what they are for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, TypeAlias

from pydantic import ConfigDict, Field, create_model, field_validator, model_validator

from otel_limits.core.catalogue import is_sold, nearest_listed
from otel_limits.core.failures import TOOL_FAILURES
from otel_limits.core.file_parts import Of, Part, optional
from otel_limits.core.limits import CONVERSATION, LIMIT_NAMES, LIMITS, SHARED_LIMITS, TREE
from otel_limits.core.policy import TOOL_ACTION
from otel_limits.core.price import TIERED, Price, PriceTier
from otel_limits.core.pricing import PriceOverride, Prices
from otel_limits.core.values import (
    BOOLEAN,
    FEE,
    PRICE,
    WHOLE_NUMBER,
    Kind,
    MappingKind,
    TextKind,
)
from otel_limits.settings.policy.document import AGENT_SETTINGS

# --- agents ---------------------------------------------------------------------------------------


def _type_of(kind: Kind[Any]) -> Any:
    """Return a kind as a type; the values of a mapping are checked, and told, one by one."""
    return (
        dict[str, _type_of(kind.each)]  # type: ignore[misc]
        if isinstance(kind, MappingKind)
        else Annotated[Any, Of(kind)]
    )


def _part(name: str, keys: Mapping[str, tuple[Any, str]]) -> type[Part]:
    """Create a model from the type and the help of each key."""
    fields: dict[str, Any] = {key: (kind, optional(text)) for key, (kind, text) in keys.items()}
    return create_model(name, __base__=Part, **fields)


def _caps(name: str, limits: Iterable[str]) -> type[Part]:
    return _part(name, {each: (_type_of(LIMITS[each].kind), LIMITS[each].help) for each in limits})


# Made from the tables of limits and settings, which variables and options are made from as well.
Section: Final = _part(
    "Section",
    {
        "limits": (_caps("Limits", LIMIT_NAMES), "Limits per invocation."),
        "tree": (
            _caps("Tree", SHARED_LIMITS[TREE]),
            "Limits across a budget tree: an invocation and all agents it starts.",
        ),
        "conversation": (
            _caps("Conversation", SHARED_LIMITS[CONVERSATION]),
            "Limits per conversation: all invocations of a thread or session.",
        ),
        **{name: (_type_of(each.kind), each.help) for name, each in AGENT_SETTINGS.items()},
    },
)


# --- models ---------------------------------------------------------------------------------------

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
        f"{name} must be a model on the price list, got {text!r}. "
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

    price: WrittenPrice = optional("Price of the models.")
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


# --- the file -------------------------------------------------------------------------------------


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
        "defaults": (Section, "Settings of all agents, unless overridden below."),
        "agents": (
            dict[str, Section],  # type: ignore[valid-type]
            "Settings by agent name or glob. The most specific glob applies, value by value.",
        ),
        "models": (
            dict[str, WrittenModel],
            "Prices by model ID or glob. The most specific glob applies.",
        ),
        "tools": (
            dict[str, WrittenTool],
            "Settings by tool name or glob. The most specific glob applies.",
        ),
        # Read by `otel_limits.quotas.section`, which most files don't need.
        "quotas": (Any, "Budgets per time window, shared by many invocations."),
    },
)
