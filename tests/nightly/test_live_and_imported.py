"""More random spans, recorded live and imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings

from tests.unit.ledger.test_imports import MANY_CALLS, PROPERTY, Shown, check_rows

if TYPE_CHECKING:
    from pathlib import Path

    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from tests.ledger.fixtures import LedgerFile


@settings(PROPERTY, max_examples=100)
@given(shown=MANY_CALLS)
def test_rows_of_many_spans_are_the_same_live_and_imported(
    shown: list[Shown], ledger: LedgerFile, tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    """As the unit test with few."""
    check_rows(shown, ledger, tmp_path, spans)
