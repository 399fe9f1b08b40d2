"""Opens exports: JSON, one or several objects of it, and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from otel_limits.core.errors import LedgerError
from otel_limits.ledger.otlp import opened

if TYPE_CHECKING:
    from otel_limits.audit.bills.bill import ExportedObject

JSON_STARTS: Final = ("{", "[")
MAX_FIELD: Final = 2**31 - 1
"""Characters of a field of a CSV file: logs may contain whole prompts."""
REST: Final = "(more)"


def objects_in(path: Path) -> Sequence[ExportedObject]:
    """Read the objects of a file: a JSON object, an array, one object per line, or rows of CSV.

    An empty file has none.

    Raises:
        LedgerError: The file cannot be read, or has none of these forms.
    """
    try:
        with opened(path) as lines:
            text = b"".join(lines).decode("utf-8-sig")
        if not text.strip():
            return []
        found = _of_json(text) if text.lstrip().startswith(JSON_STARTS) else _of_csv(text)
    except OSError as error:
        raise LedgerError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError, csv.Error) as error:
        raise LedgerError(
            f"{path} is neither JSON nor CSV: {error}. Export the file again."
        ) from None
    if not all(isinstance(each, dict) for each in found):
        raise LedgerError(f"{path} is not a bill: it has values that are not objects.")
    return found


def _of_json(text: str) -> list[Any]:
    # Amounts are parsed to decimals: a float would round them.
    def parsed(document: str) -> Any:
        return json.loads(document, parse_float=Decimal, parse_constant=_reject)

    try:
        whole = parsed(text)
    except ValueError:
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) < 2 or not lines[0].rstrip().endswith("}"):  # noqa: PLR2004
            raise
        return [parsed(line) for line in lines]
    return whole if isinstance(whole, list) else [whole]


def _reject(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


def _of_csv(text: str) -> list[Any]:
    csv.field_size_limit(MAX_FIELD)
    rows = csv.DictReader(io.StringIO(text, newline=""), restkey=REST, strict=True)
    found: list[Any] = []
    for row in rows:
        if REST in row or None in row.values():
            raise ValueError(f"line {rows.line_num} has not {len(rows.fieldnames or ())} fields")
        found.append({name.strip(): value for name, value in row.items()})
    if not rows.fieldnames or len(rows.fieldnames) == 1:
        raise ValueError("its first line has no column names")
    return found
