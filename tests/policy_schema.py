"""The JSON Schema of the policy file, from the models that check the file.

Editors use it to complete keys and mark mistakes. `python -m tests.generate schema` writes it into
the package.
"""

from __future__ import annotations

import json
from typing import Any, Final

from otel_limits.quotas.section import schema as quotas_schema
from otel_limits.settings.policy.reader import File
from tests.paths import ROOT

PATH: Final = ROOT / "otel_limits/policy.schema.json"


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a policy file."""
    described = File.model_json_schema()
    described["properties"]["quotas"] |= quotas_schema()
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **_for_editors(described),
        "title": "Policy file of otel-limits",
    }


def write() -> None:
    """Write it."""
    PATH.write_text(json.dumps(schema(), indent=2) + "\n", encoding="utf-8")


def _for_editors(part: Any) -> Any:
    """Omit titles, which repeat names, and defaults in code, which a file cannot contain."""
    if isinstance(part, list):
        return [_for_editors(each) for each in part]
    if not isinstance(part, dict):
        return part
    others = {
        key: _for_editors(each)
        for key, each in part.items()
        if key not in ("title", "default", "$ref")
    }
    # Wrapped, because draft 7 ignores all other keywords of a reference.
    reference = {"$ref": part["$ref"]} if "$ref" in part else {}
    return {**others, "allOf": [reference]} if reference and others else reference | others
