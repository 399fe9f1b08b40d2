"""Generates the JSON Schema of the policy file.

`python -m tests.generate schema` writes it.

Editors use it to complete keys and mark mistakes. It is generated from the tables used to read the
file.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from otel_limits.core.limits import LIMIT_NAMES, LIMITS, TREE_LIMITS
from otel_limits.core.values import BOOLEAN, FEE, PRICE, TEXT, WHOLE_NUMBER
from otel_limits.quotas.section import schema as quotas_schema
from otel_limits.settings.policy.document import (
    ABOVE,
    ABOVE_HELP,
    AGENT_SETTINGS,
    EXEMPT_HELP,
    FEES,
    MODEL_KEYS,
    REQUIRED_PRICES,
    ROOT,
    TIERED_PRICES,
    TIERS,
    TIERS_HELP,
)

PATH: Final = Path(__file__).parents[2] / "policy.schema.json"
"""Its path in the package."""


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a policy file."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Policy file of otel-limits",
        **_mapping(
            {name: _described(text, _parts()[name]) for name, text in ROOT.items()},
        ),
        "definitions": {
            "section": _section(),
            "limits": _caps(LIMIT_NAMES),
            "tree": _caps(TREE_LIMITS),
        },
    }


def write() -> None:
    """Write it into the package."""
    PATH.write_text(json.dumps(schema(), indent=2) + "\n", encoding="utf-8")


def _parts() -> dict[str, dict[str, Any]]:
    return {
        "defaults": _reference("section"),
        "agents": _by_name(_reference("section")),
        "models": _by_name(_model()),
        "tools": _by_name(_mapping({"exempt": _described(EXEMPT_HELP, BOOLEAN.schema)})),
        "quotas": quotas_schema(),
    }


def _model() -> dict[str, Any]:
    tiered = {name: _described(text, PRICE.schema) for name, text in TIERED_PRICES.items()}
    fees = {name: _described(text, FEE.schema) for name, text in FEES.items()}
    above = _described(ABOVE_HELP, WHOLE_NUMBER.schema)
    tier = {**_mapping({ABOVE: above, **tiered}), "required": [ABOVE]}
    tiers = _described(TIERS_HELP, {"type": "array", "items": tier})
    price = {**_mapping({**tiered, **fees, TIERS: tiers}), "required": list(REQUIRED_PRICES)}
    kinds = {"price": price, "as": TEXT.schema, "provider": TEXT.schema, "local": BOOLEAN.schema}
    parts = {name: _described(text, kinds[name]) for name, text in MODEL_KEYS.items()}
    local = {"properties": {"local": {"const": True}}, "required": ["local"]}
    priced = {"anyOf": [{"required": ["price"]}, {"required": ["as"]}]}
    return {**_mapping(parts), "oneOf": [priced, local]}


def _section() -> dict[str, Any]:
    return _mapping(
        {
            "limits": _described("Limits per invocation.", _reference("limits")),
            "tree": _described(
                "Limits across a budget tree: an invocation and all agents it starts.",
                _reference("tree"),
            ),
            **{
                name: _described(setting.help, setting.kind.schema)
                for name, setting in AGENT_SETTINGS.items()
            },
        }
    )


def _caps(names: Collection[str]) -> dict[str, Any]:
    return _mapping(
        {name: _described(LIMITS[name].help, LIMITS[name].kind.schema) for name in names}
    )


def _mapping(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _by_name(each: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": each}


def _reference(name: str) -> dict[str, Any]:
    return {"allOf": [{"$ref": f"#/definitions/{name}"}]}


def _described(text: str, rest: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": text, **rest}
