"""Draws the image of `otel-limits top` for the README: a small fleet with realistic numbers."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

from otel_limits.cli.top.screen import View, draw
from tests.top.pages import BEGAN, YOUNG, scrape, watched

if TYPE_CHECKING:
    from otel_limits.top.fleet import Fleet

PICTURE: Final = Path(__file__).parents[2] / "otel_limits/docs/top.svg"
WIDTH: Final = 120
HEIGHT: Final = 23

WEB_FONT: Final = re.compile(r",\s*url\([^)]*\) format\([^)]*\)")
"""A font from the network, which a picture in a README may not load."""

# agent, running, turns a minute and of what runs, tokens a minute, USD in 5 minutes, halts,
# refusals, errors
AGENTS: Final[tuple[tuple[str, int, int, int, int, float, dict[str, int], int, int], ...]] = (
    ("researcher", 4, 62, 88, 214_000, 1.9, {"max_cost_usd": 3, "loop_detected": 1}, 17, 2),
    ("invoice-reader", 11, 140, 66, 96_000, 0.42, {"max_turns": 2}, 0, 0),
    ("support-chat", 7, 51, 21, 38_000, 0.17, {}, 0, 5),
    ("nightly-report", 1, 9, 19, 41_000, 0.13, {"quota_exceeded": 6}, 0, 0),
    ("translator", 0, 0, 0, 0, 0.0, {}, 0, 0),
)
QUOTA: Final = """
    quota_used{quota="acme-day",key="(all)"} 4790000
    quota_reserved{quota="acme-day",key="(all)"} 66000
    quota_limit{quota="acme-day",key="(all)"} 5000000
    quota_resets_timestamp_seconds{quota="acme-day",key="(all)"} %d
"""
TRACE: Final = 'stops_total{agent="%s",reason="%s",action="halted"} %d'


def counters(part: float) -> str:
    """Write what all agents have counted when a part of five minutes is over."""
    lines = [QUOTA % (BEGAN + 36_000), YOUNG]
    for agent, running, turns, open_turns, tokens, usd, halts, refusals, errors in AGENTS:
        labels = f'{{agent="{agent}"'
        counted = 1000 + turns * 5 * part
        lines += [
            f"invocations_in_progress{labels}}} {running}",
            f"turns_total{labels}}} {counted}",
            f"invocation_turns_sum{labels}}} {counted - open_turns}",
            f'limit{labels},limit="max_turns"}} 25',
            f'tokens_total{labels},model="m",type="input"}} {tokens * 5 * part}',
            f'cost_usd_total{labels},model="m"}} {usd * part}',
            f'tool_calls_total{labels},tool="t",status="error"}} {errors}',
            f'tool_refusals_total{labels},tool="web_search",action="refused"}} {refusals}',
            f'budget_used_ratio_bucket{labels},limit="max_turns",le="0.8"}} {90 if halts else 99}',
            f'budget_used_ratio_bucket{labels},limit="max_turns",le="1.0"}} 100',
            f'budget_used_ratio_bucket{labels},limit="max_turns",le="+Inf"}} 100',
        ]
        for reason, count in halts.items():
            before = count - 1 if agent != "nightly-report" else count
            lines.append(TRACE % (agent, reason, count if part > 0.9 else before))
    return "\n".join(lines)


def example() -> Fleet:
    """Return the fleet's state after five minutes."""
    return watched(*(scrape(counters(second / 300), second, "host") for second in range(0, 301, 5)))


def lines() -> list[str]:
    """Return what the picture shows."""
    return [line.plain for line in draw(example(), View(), WIDTH, HEIGHT)]


def draw_svg() -> str:
    """Draw it as SVG."""
    screen = Console(
        width=WIDTH, record=True, file=io.StringIO(), force_terminal=True, highlight=False
    )
    for line in draw(example(), View(), WIDTH, HEIGHT):
        screen.print(line, no_wrap=True)
    picture = screen.export_svg(title="otel-limits top", unique_id="top")
    return WEB_FONT.sub("", picture)


def write() -> None:
    """Write the image. It contains local times, so set TZ to UTC first."""
    PICTURE.write_text(draw_svg(), encoding="utf-8")
