"""What can be written in a policy file: how each kind of value is read, and told to editors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.limits import (
    ACTIONS,
    UNMEASURED,
    UNPRICED,
    VALIDATORS,
    require_calls_per_tool,
    require_choice,
    require_positive_integer,
    require_seconds,
    require_switchable,
    require_usd,
)

if TYPE_CHECKING:
    from otel_limits.settings.policy.yaml_tree import Node


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of value."""

    read: Callable[[str, Node], Any]
    """Takes the key and what is written; raises `ValueError` with a sentence."""
    schema: Mapping[str, Any]
    """The same as JSON Schema."""


def _scalar(key: str, node: Node) -> bool | int | Decimal | str:
    value = node.value
    if value is None or isinstance(value, (tuple, Mapping)):
        raise ValueError(f"{key} must be a single value, got {node.shown}.")
    return value


def _number(validate: Callable[[str, object], Any]) -> Callable[[str, Node], Any]:
    def read(key: str, node: Node) -> Any:
        value = _scalar(key, node)
        return validate(key, float(value) if isinstance(value, Decimal) else value)

    return read


def _usd(key: str, node: Node) -> Decimal:
    try:
        return require_usd(key, _scalar(key, node))
    except ValueError:
        raise ValueError(
            f"{key} must be an amount of USD above 0, such as 0.50, got {node.shown}."
        ) from None


def _price(key: str, node: Node) -> Decimal:
    value = node.value
    if isinstance(value, bool) or not isinstance(value, (int, Decimal)) or value < 0:
        raise ValueError(
            f"{key} must be USD per million tokens, 0 or more, such as 2.50, got {node.shown}."
        )
    return Decimal(value)


def _boolean(key: str, node: Node) -> bool:
    if not isinstance(node.value, bool):
        raise ValueError(f"{key} must be true or false, got {node.shown}.")  # noqa: TRY004
    return node.value


def _fractions(key: str, node: Node) -> tuple[float, ...]:
    items = node.value if isinstance(node.value, tuple) else ()
    if not items:
        raise ValueError(
            f"{key} must be a list of fractions above 0 and up to 1, such as [0.5, 0.8], "
            f"got {node.shown}."
        )
    return tuple(sorted({_fraction(key, item) for item in items}))


def _fraction(key: str, node: Node) -> float:
    value = node.value
    if isinstance(value, bool) or not isinstance(value, (int, Decimal)) or not 0 < value <= 1:
        raise ValueError(
            f"{key} must hold fractions above 0 and up to 1, such as 0.8, got {node.shown}."
        )
    return float(value)


def _choice(*choices: str) -> Kind:
    def read(key: str, node: Node) -> str:
        return require_choice(key, _scalar(key, node), choices)

    return Kind(read, {"enum": list(choices)})


WHOLE_NUMBER: Final = Kind(_number(require_positive_integer), {"type": "integer", "minimum": 1})
BOOLEAN: Final = Kind(_boolean, {"type": "boolean"})

CAPS: Final[Mapping[Callable[[str, object], Any], Kind]] = {
    require_positive_integer: WHOLE_NUMBER,
    require_switchable: Kind(_number(require_switchable), {"type": "integer", "minimum": 0}),
    require_seconds: Kind(_number(require_seconds), {"type": "number", "exclusiveMinimum": 0}),
    require_usd: Kind(_usd, {"type": "number", "exclusiveMinimum": 0}),
}
"""Caps, by the function that validates them in code."""

SETTINGS: Final[Mapping[str, Kind]] = {
    "action": _choice(*ACTIONS),
    "warn_at": Kind(
        _fractions,
        {
            "type": "array",
            "items": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            "minItems": 1,
        },
    ),
    "tell_model": BOOLEAN,
    "nudge_disabled": BOOLEAN,
    "unmeasured": _choice(*UNMEASURED),
    "unpriced": _choice(*UNPRICED),
}
"""What can be set for an agent beside its caps; each is named as in the environment."""

SECTION_KEYS: Final = ("limits", "tree", *SETTINGS)
"""What can be said about all agents, or about some."""

PRICE: Final = Kind(_price, {"type": "number", "minimum": 0})
PRICES: Final[Mapping[str, str]] = {
    "input": "USD per million input tokens.",
    "output": "USD per million output tokens.",
    "cache_read": "USD per million input tokens read from a cache; unset, they cost as input.",
    "cache_write": "USD per million input tokens written to a cache; unset, they cost as input.",
}
REQUIRED_PRICES: Final = ("input", "output")

ROOT: Final[Mapping[str, str]] = {
    "defaults": "What applies to every agent, unless something more specific is said below.",
    "agents": "What applies to the agents whose name fits a glob; the most specific glob wins, "
    "value by value.",
    "models": "Prices of the models whose id fits a glob; the most specific glob wins.",
    "tools": "What applies to the tools whose name fits a glob; the most specific glob wins.",
    "quotas": "Budgets over a time window, shared by many invocations.",
}
HELP: Final[Mapping[str, str]] = {
    "max_calls_per_tool": "Calls of single tools per invocation, by the tool's name.",
    "warn_at": "Fractions of a cap at which a warning is given once, such as [0.5, 0.8, 0.95].",
}
"""What is written otherwise than in the environment."""

EXEMPT_HELP: Final = "Whether loop limits ignore the tool, as befits one that is meant to poll."


def cap_kind(name: str) -> Kind | None:
    """How the limit `name` is written; `None` for the one that holds a cap for each tool."""
    validate = VALIDATORS.get(name, require_positive_integer)
    return None if validate is require_calls_per_tool else CAPS[validate]
