"""Example command lines, shown in the help of commands without their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

EXAMPLES: Final[Mapping[str, str]] = {
    "otel-limits": "otel-limits run --max-turns 30 -- python app.py",
    "otel-limits autoload": "otel-limits autoload install",
    "otel-limits autoload install": "otel-limits autoload install",
    "otel-limits autoload status": "otel-limits autoload status",
    "otel-limits autoload remove": "otel-limits autoload remove",
    "otel-limits check": "otel-limits check --agent research-assistant",
    "otel-limits demo": "otel-limits demo",
    "otel-limits audit": "otel-limits audit spend --by agent --since 7d",
    "otel-limits audit spend": "otel-limits audit spend --by agent,model --since 30d",
    "otel-limits audit stops": "otel-limits audit stops --since 7d",
    "otel-limits audit show": "otel-limits audit show 4bf92f3577b34da6",
    "otel-limits audit loops": "otel-limits audit loops --since 7d",
    "otel-limits audit reconcile": "otel-limits audit reconcile --prometheus http://localhost:9090",
    "otel-limits audit backtest": "otel-limits audit backtest --max-turns 20 --since 30d",
    "otel-limits audit suggest": "otel-limits audit suggest --since 30d",
    "otel-limits audit anomalies": "otel-limits audit anomalies --since 30d",
    "otel-limits audit grants": "otel-limits audit grants --since 30d",
    "otel-limits audit budget": "otel-limits audit budget --policy limits.yaml",
    "otel-limits audit policies": "otel-limits audit policies --since 7d",
    "otel-limits audit whois": "otel-limits audit whois joe",
    "otel-limits audit unmeasured": "otel-limits audit unmeasured --since 7d",
    "otel-limits audit verify": "otel-limits audit verify",
    "otel-limits audit schema": "otel-limits audit schema spend",
    "otel-limits ledger": "otel-limits ledger prune --older-than 90d",
    "otel-limits ledger prune": "otel-limits ledger prune --older-than 90d",
    "otel-limits ledger export": "otel-limits ledger export --format csv --output calls.csv",
    "otel-limits ledger import": "otel-limits ledger import spans.jsonl",
    "otel-limits ledger reprice": "otel-limits ledger reprice --since 30d",
    "otel-limits ledger adopt": "otel-limits ledger adopt lost.spill --into ledger.db",
    "otel-limits ledger close": "otel-limits ledger close --month 2026-10 "
    "--after september.json > october.json",
    "otel-limits ledger accept": "otel-limits ledger accept 'ledger.db.spill-7-1a2b.damaged' "
    "--reason 'disk replaced, lines unreadable'",
    "otel-limits ledger merge": "otel-limits ledger merge node-1.db node-2.db --into all.db",
    "otel-limits ledger end-lost": "otel-limits ledger end-lost --older-than 1d",
    "otel-limits dashboards": "otel-limits dashboards export grafana",
    "otel-limits dashboards export": "otel-limits dashboards export grafana",
    "otel-limits quotas": "otel-limits quotas --top 10 --key 'team-*'",
    "otel-limits quotas reset": "otel-limits quotas reset tenants acme",
    "otel-limits quotas revoke": "otel-limits quotas revoke tenants acme",
    "otel-limits quotas unset": "otel-limits quotas unset tenants acme",
    "otel-limits quotas unblock": "otel-limits quotas unblock tenants acme",
    "otel-limits docs": "otel-limits docs limits",
    "otel-limits top": "otel-limits top --scrape http://localhost:9464/metrics",
}
"""By command name. Commands that are missing show an example within their help."""


def example_of(command: str) -> str | None:
    """Return the example at the end of a command's help, if any."""
    line = EXAMPLES.get(command)
    return None if line is None else f"example:\n  {line}"
