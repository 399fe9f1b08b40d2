"""Writes dashboards, rules and alerts: `python -m dashboards.build [DIR]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import agent_limits, health, panels, queries, rules, token_spend

COMMITTED: Final = Path(__file__).parent

BUILDS: Final = "otel_limits_build_info"

CLUSTER = panels.variable(
    "cluster", BUILDS, "If your Prometheus adds this label.", is_optional=True
)
NAMESPACE = panels.variable(
    "namespace",
    f'{BUILDS}{{cluster=~"$cluster"}}',
    "If your Prometheus adds this label.",
    is_optional=True,
)
JOB = panels.variable(
    "job",
    f'{BUILDS}{{cluster=~"$cluster",namespace=~"$namespace"}}',
    "Scrape job, or service name over OTLP.",
    is_optional=True,
)
INSTANCE = panels.variable(
    "instance",
    f'{BUILDS}{{cluster=~"$cluster",namespace=~"$namespace",job=~"$job"}}',
    "Reporting process.",
    is_optional=True,
)
AGENT = panels.variable("agent", queries.select("otel_limits_turns_total"), "Agent name.")
MODEL = panels.variable(
    "model",
    queries.select("otel_limits_model_calls_total", queries.AGENT),
    "Model ID. Affects model-call panels only.",
)
REASON = panels.variable(
    "reason",
    queries.select("otel_limits_stops_total", queries.AGENT),
    "Stop reason. Affects invocation panels only.",
)
QUOTA = panels.variable(
    "quota",
    queries.select("otel_limits_quota_limit"),
    "Quota name. Affects quota panels only.",
)
TARGETS: Final = (CLUSTER, NAMESPACE, JOB, INSTANCE)

ANNOTATIONS: Final = (
    panels.annotation(
        "Deployments",
        "blue",
        queries.DEPLOYMENTS,
        "{{job}}: version {{service_version}}, otel-limits {{version}}",
    ),
    panels.annotation("Policy files", "purple", queries.POLICY_READS, "Policy file {{outcome}}"),
    panels.annotation("Kills", "red", queries.KILLS, "{{agent}} was killed"),
)


def dashboards() -> dict[str, Any]:
    """Return every dashboard by file name."""
    return {
        "agent-limits": _filled(
            panels.make_dashboard(
                panels.AGENTS,
                "Agent limits",
                "Why agents halt, what they spend and how close they are to their limits.",
                *TARGETS,
                AGENT,
                MODEL,
                REASON,
                QUOTA,
            ),
            agent_limits.ROWS,
            mark_halts=False,  # its panels show them
        ),
        "token-spend": _filled(
            panels.make_dashboard(
                panels.SPEND,
                "Token spend",
                "Token usage and cost by agent, model and quota.",
                *TARGETS,
                AGENT,
                MODEL,
                QUOTA,
            ),
            token_spend.ROWS,
        ),
        "health": _filled(
            panels.make_dashboard(
                panels.HEALTH,
                "otel-limits health",
                "Telemetry coverage and internal errors of otel-limits.",
                *TARGETS,
                AGENT,
            ),
            health.ROWS,
        ),
    }


def _filled(
    board: Any, rows: tuple[tuple[str, tuple[Any, ...]], ...], *, mark_halts: bool = True
) -> Any:
    """Add annotations and rows of numbered panels to a dashboard."""
    halts = panels.annotation(
        "Halts", "orange", queries.ALL_HALTS, "{{agent}}: {{reason}}", shown=mark_halts
    )
    for each in (*ANNOTATIONS, halts):
        board = board.annotation(each)
    ids = iter(range(1, 1000))
    for title, members in rows:
        board = board.with_row(panels.row(title).id(next(ids)))
        for panel in members:
            board = board.with_panel(panel.id(next(ids)))
    return board.build()


def _as_json(board: Any) -> dict[str, Any]:
    """Return the JSON of a dashboard, without fields of the SDK that Grafana no longer has."""
    plain: dict[str, Any] = json.loads(json.dumps(board, cls=JSONEncoder))
    for each in plain["templating"]["list"]:
        for name in ("auto", "auto_count", "auto_min"):
            each.pop(name, None)
    for panel in plain["panels"]:
        panel.get("options", {}).pop("footer", None)
    return plain


def write(directory: Path) -> None:
    """Write one JSON file per dashboard, and the rules."""
    out = directory / "grafana" / "dashboards"
    out.mkdir(parents=True, exist_ok=True)
    boards = {name: _as_json(board) for name, board in dashboards().items()}
    for name, board in boards.items():
        text = json.dumps(board, indent=2, sort_keys=True)
        (out / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")
    rules.write(directory, boards)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if sys.argv[1:] else COMMITTED)
