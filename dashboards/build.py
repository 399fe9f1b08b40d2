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

ENVIRONMENT = panels.variable(
    "deployment_environment",
    BUILDS,
    "What the resource of the service says: deployment.environment.name.",
    absent=True,
)
PLACE = (
    panels.variable(
        "cluster",
        f"{BUILDS}{{{queries.ENVIRONMENT}}}",
        "Where Prometheus adds this label.",
        absent=True,
    ),
    panels.variable(
        "namespace",
        f'{BUILDS}{{{queries.ENVIRONMENT},cluster=~"$cluster"}}',
        "Where Prometheus adds this label.",
        absent=True,
    ),
    panels.variable(
        "job",
        f'{BUILDS}{{{queries.ENVIRONMENT},cluster=~"$cluster",namespace=~"$namespace"}}',
        "Scrape job, or service name over OTLP.",
        absent=True,
    ),
    panels.variable(
        "instance",
        f'{BUILDS}{{{queries.ENVIRONMENT},cluster=~"$cluster",namespace=~"$namespace",job=~"$job"}}',
        "Process that reports.",
        absent=True,
    ),
)
AGENT = panels.variable(
    "agent", queries.select("otel_limits_turns_total"), "Agent, by the name it has in the code."
)
MODEL = panels.variable(
    "model",
    queries.select("otel_limits_model_calls_total", queries.AGENT),
    "Model id, as the provider knows it. Only what is about model calls follows it.",
)
REASON = panels.variable(
    "reason",
    queries.select("otel_limits_stops_total", queries.AGENT),
    "Why an invocation ended. Only what is about ends follows it.",
)
QUOTA = panels.variable(
    "quota",
    queries.select("otel_limits_quota_limit"),
    "Quota of the policy file. Only what is about quotas follows it.",
)

ANNOTATIONS: Final = (
    panels.annotation("Deployments", "blue", queries.DEPLOYMENTS, queries.DEPLOYED),
    panels.annotation("Policy files", "purple", queries.POLICIES, "Policy file {{outcome}}"),
    panels.annotation("Kills", "red", queries.KILLED, "{{agent}} was killed"),
)
"""What happened to the agents from outside, drawn over everything."""


def dashboards() -> dict[str, Any]:
    """Every dashboard, by file name."""
    return {
        "agent-limits": _filled(
            panels.make_dashboard(
                agent_limits.UID,
                "Agent limits",
                "What stops LLM agents, and how close the others are to their limits.",
                ENVIRONMENT,
                *PLACE,
                AGENT,
                MODEL,
                REASON,
                QUOTA,
            ),
            agent_limits.ROWS,
            halts_shown=False,  # they are what its panels draw
        ),
        "token-spend": _filled(
            panels.make_dashboard(
                token_spend.UID,
                "Token spend",
                "Tokens and US dollars that LLM agents use, by agent and model.",
                ENVIRONMENT,
                *PLACE,
                AGENT,
                MODEL,
                QUOTA,
            ),
            token_spend.ROWS,
        ),
        "health": _filled(
            panels.make_dashboard(
                health.UID,
                "otel-limits health",
                "Whether otel-limits sees every invocation, and whether it works.",
                ENVIRONMENT,
                *PLACE,
                AGENT,
            ),
            health.ROWS,
        ),
    }


def _filled(
    board: Any, rows: tuple[tuple[str, tuple[Any, ...]], ...], *, halts_shown: bool = True
) -> Any:
    """Put rows of panels into a dashboard, each with its own id, and what is marked on all."""
    halts = panels.annotation(
        "Halts", "orange", queries.HALTED, "{{agent}}: {{reason}}", shown=halts_shown
    )
    for each in (*ANNOTATIONS, halts):
        board = board.annotation(each)
    ids = iter(range(1, 1000))
    for title, members in rows:
        board = board.with_row(panels.row(title).id(next(ids)))
        for panel in members:
            board = board.with_panel(panel.id(next(ids)))
    return board.build()


def _plain(board: Any) -> dict[str, Any]:
    """Turn a dashboard into what JSON knows, without what the SDK adds and Grafana has no more."""
    plain: dict[str, Any] = json.loads(json.dumps(board, cls=JSONEncoder))
    for each in plain["templating"]["list"]:
        for name in ("auto", "auto_count", "auto_min"):
            each.pop(name, None)
    for panel in plain["panels"]:
        panel.get("options", {}).pop("footer", None)
    return plain


def write(directory: Path) -> None:
    """Write one JSON file per dashboard, and what is made of the templates."""
    boards = directory / "grafana" / "dashboards"
    boards.mkdir(parents=True, exist_ok=True)
    made = {name: _plain(board) for name, board in dashboards().items()}
    for name, board in made.items():
        text = json.dumps(board, indent=2, sort_keys=True)
        (boards / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")
    rules.write(directory, made)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if sys.argv[1:] else COMMITTED)
