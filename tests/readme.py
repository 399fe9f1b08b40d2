"""Generated tables of the README and the documentation pages."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final

from packaging.requirements import Requirement

import otel_limits
import otel_limits.frameworks
import otel_limits.testing
from otel_limits import docs
from otel_limits.bindings.gateways import SPENT
from otel_limits.bindings.known import own_limits
from otel_limits.cli.check import shown
from otel_limits.core.halt_texts import EXEMPT, LOOP_NEXT, WHY, cause_of, for_operator
from otel_limits.core.limits import LIMITS, STOP_REASONS, Breach
from otel_limits.core.policy import KILLED, Verdict
from otel_limits.observers.conventions import CONVENTIONAL
from otel_limits.observers.metrics import METRICS
from otel_limits.quotas.keys import Key
from otel_limits.quotas.needs import QuotaNeed
from otel_limits.quotas.refusals import UNAVAILABLE, exceeded, unanswered
from otel_limits.quotas.store import CountState, Demand, Reply
from otel_limits.settings.policy.document import AGENT_SETTINGS
from otel_limits.settings.policy.reader import parse
from otel_limits.settings.table import SETTINGS
from tests import rooms, third_party
from tests.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from otel_limits.quotas.quota import Quota

README: Final = ROOT / "README.md"
DOCS: Final = ROOT / "otel_limits/docs"
INDEX: Final = DOCS / "README.md"
"""The list of all pages, which GitHub shows below the files of their folder."""
CONTRIBUTING: Final = ROOT / ".github" / "CONTRIBUTING.md"

PAGES: Final = tuple(path for path in sorted(DOCS.glob("*.md")) if path != INDEX)

REASON_CAUSES: Final[Mapping[str, str]] = {
    **{
        reason: ", ".join(f"`{limit.name}`" for limit in LIMITS.values() if limit.reason == reason)
        for reason in STOP_REASONS
    },
    "quota_exceeded": "a quota, or an LLM gateway that reports an exhausted budget",
    "quota_unavailable": "a quota with `on_store_error: deny` whose store is unavailable",
    "killed": "`otel_limits.kill()`, `SIGUSR2`",
}
"""The cause of each stop reason, in Markdown."""


def table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Format a Markdown table."""
    lines = [tuple(titles), *map(tuple, rows)]
    lines.insert(1, ("---",) * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def pages_table() -> str:
    """Format the index of the pages, by group."""
    return "\n".join(
        f"**{group.capitalize()}**\n\n{table(('page', 'about'), rows)}"
        for group, pages in docs.PAGES.items()
        for rows in [[(f"[{name}]({name}.md)", about) for name, about in pages.items()]]
    )


def settings_table() -> str:
    """Format all environment variables."""
    rows = ((f"`{setting.variable}`", shown(setting.default), setting.help) for setting in SETTINGS)
    return table(("variable", "default", "meaning"), rows)


def policy_keys_table() -> str:
    """Format the keys of a section of the policy file, next to its limits."""
    return table(
        ("key", "meaning"), ((f"`{name}`", AGENT_SETTINGS[name].help) for name in AGENT_SETTINGS)
    )


def reasons_table() -> str:
    """Format all stop reasons, in their order of precedence, with their causes for each reader."""
    rows = (
        (f"`{reason}`", REASON_CAUSES[reason], WHY[reason], cause_of(Verdict(reason, breaches)))
        for reason in STOP_REASONS
        for breaches in [tuple(each for each in example_breaches() if each.reason == reason)]
    )
    return table(("stop reason", "limits", "end user", "calling model"), rows)


def own_limits_table() -> str:
    """Format the stop reasons that are limits of the frameworks themselves."""
    rows = ((f"`{reason}`", where) for reason, where in own_limits().items())
    return table(("stop reason", "framework's own limit"), rows)


def example_breaches() -> tuple[Breach, ...]:
    """Return a breach of each limit, whose cap is 30."""
    return tuple(
        Breach(limit.name, 30, 30, limit.reason, limit.unit, origin=ORIGIN)
        for limit in LIMITS.values()
    )


ORIGIN: Final = "limits.yaml:3"


def halts_table() -> str:
    """Format the operator's sentences whose advice is not to raise the limit or to run again."""
    price = "no price for model 'model-x', so max_cost_usd=30 cannot be enforced"
    of = {breach.limit: breach for breach in example_breaches()}
    cost = of["max_cost_usd"]
    breaches = {
        **{f"`{name}`": breach for name, breach in of.items() if name in LOOP_NEXT},
        "the limit of a tree": replace(of["max_turns"], limit="tree_max_turns"),
        "after resumes": replace(of["max_turns"], resumes=7),
        "a price is unknown": replace(cost, uncounted=True, note=price),
        "a price is only known at most": replace(cost, at_most=True),
        **quota_breaches(),
    }
    verdicts = {name: Verdict(breach.reason, (breach,)) for name, breach in breaches.items()}
    verdicts |= {"the budget of a vendor or gateway": SPENT, "a kill": KILLED}
    rows = ((name, operator_advice(verdict)) for name, verdict in verdicts.items())
    return table(("halt by", "the operator reads"), rows)


def quota_breaches() -> dict[str, Breach]:
    """Return the refusal of a call by a used quota, and by one whose store is unavailable."""
    text = "quotas: {daily: {model_calls: 30, window: day}}"
    quota: Quota = parse(text, "limits.yaml")[0].quotas["daily"].value
    key, now = Key("", ""), datetime(2026, 11, 23, 8, tzinfo=timezone.utc).timestamp()
    need = QuotaNeed(quota, key, 30, 1, at_most=False, certain=True, model="", action="halt")
    demand, used = Demand(count=quota.count(key, now), amount=1, limit=30), CountState(30, 0, 30)
    breaches = {
        "a quota": exceeded(need, demand, Reply("refused", now), used),
        "a quota without its store": unanswered(need, demand, None, now, 1, UNAVAILABLE),
    }
    return {name: replace(breach, origin=ORIGIN) for name, breach in breaches.items()}


def operator_advice(verdict: Verdict) -> str:
    """Return the operator's sentence without the parts that are the same for all limits."""
    text = for_operator("a", verdict, "killed" if verdict is KILLED else "halted")
    for same in ("Agent 'a' was halted by ", f" The limit is set in {ORIGIN}."):
        text = text.replace(same, "")
    return re.sub(r"^\w+: ", "", text.replace(f"; {EXEMPT}", "."))


def metrics_table() -> str:
    """Format all metrics."""
    rows = (
        (f"`{spec.name}`", ", ".join(f"`{label}`" for label in spec.labels) or "none", spec.help)
        for spec in METRICS
    )
    return table(("metric", "labels", "meaning"), rows)


def conventions_table() -> str:
    """Format all metrics of OpenTelemetry's semantic conventions."""
    rows = (
        (
            f"`{spec.convention}`",
            f"`{spec.name}`",
            ", ".join(f"`{label}`" for label in spec.labels),
            describe_buckets(spec.buckets),
        )
        for spec in CONVENTIONAL
    )
    return table(("metric", "in Prometheus", "attributes", "buckets"), rows)


def describe_buckets(buckets: Sequence[float]) -> str:
    """Describe exponential buckets by first bound, last bound and factor."""
    factor = round(buckets[1] / buckets[0])
    return f"{buckets[0]:g} to {buckets[-1]:.10g}, each {factor} times the previous"


def names_table() -> str:
    """Format all public names: the value of a constant, the first line of any other docstring."""
    rows = []
    for module in (otel_limits, otel_limits.testing, otel_limits.frameworks):
        for name in module.__all__:
            value = getattr(module, name)
            text = f'`"{value}"`' if isinstance(value, str) else ALIASES.get(name) or value.__doc__
            rows.append((f"`{module.__name__}.{name}`", text.partition("\n")[0]))
    return table(("name", "meaning"), rows)


ALIASES: Final[Mapping[str, str]] = {
    "Event": "Any event that an observer receives.",
    "Observer": "Any callable that takes an event.",
    "NOTHING_REPORTED": "The usage of a call whose vendor has reported none.",
}
"""Descriptions of type aliases, which have no docstring."""


def code(language: str, source: str) -> str:
    """Format source code."""
    return f"```{language}\n{source.rstrip()}\n```\n"


def bots_part(number: int) -> str:
    """Return one part of the small framework of the example: its types, or its agent."""
    before, agent = third_party.framework().split("\n\n\n@dataclass\nclass Bot:")
    return code("python", (before, f"@dataclass\nclass Bot:{agent}")[number])


def binding_part(number: int) -> str:
    """Return one part of the binding of that framework: its imports, or one of its classes."""
    parts = third_party.binding().split("\n\n\n")
    parts[-2:] = ["\n\n\n".join(parts[-2:])]  # the class of the framework with its object
    return code("python", parts[number])


SOURCE: Final = "."
"""From which pages install otel-limits: a checkout, until it is on a package index."""


def install(extra: str) -> str:
    """Format the command that installs otel-limits with an extra."""
    return code("console", f"pip install '{SOURCE}[{extra}]'")


EXTRAS: Final[Mapping[str, str]] = {
    "strands": "Strands agents",
    "langchain": "LangChain and LangGraph",
    "openai-agents": "the OpenAI Agents SDK",
    "prices": "model prices (Python 3.11 or newer)",
    "redis": "quotas in Redis or Valkey",
    "postgres": "a ledger in PostgreSQL",
    "otlp": "OTLP export of spans, metrics and events",
}
"""The use of each extra that `all` contains."""
NEWEST: Final = {"python_version": "3.14"}
"""Some extras install nothing in older releases of Python."""


def extras_table() -> str:
    """Format the extras, with the releases of the packages that they install."""
    required: dict[str, list[str]] = {extra: [] for extra in EXTRAS}
    for each in map(Requirement, importlib.metadata.requires("otel-limits") or ()):
        for extra in EXTRAS:
            if each.marker is not None and each.marker.evaluate({"extra": extra, **NEWEST}):
                required[extra].append(f"{each.name} `{each.specifier}`")
    rows = ((f"`{extra}`", EXTRAS[extra], ", ".join(sorted(required[extra]))) for extra in EXTRAS)
    return table(("extra", "for", "installs"), rows)


TABLES: Final[Mapping[str, Callable[[], str]]] = {
    **{
        f"install-{extra}": functools.partial(install, extra)
        for extra in ("strands", "langchain", "openai-agents")
    },
    "pages": pages_table,
    "rooms": rooms.rooms_table,
    "sizes": rooms.sizes_picture,
    "extras": extras_table,
    "settings": settings_table,
    "policy-keys": policy_keys_table,
    "reasons": reasons_table,
    "own-limits": own_limits_table,
    "halts": halts_table,
    "metrics": metrics_table,
    "conventions": conventions_table,
    "names": names_table,
    "bots": lambda: bots_part(0),
    "bots-agent": lambda: bots_part(1),
    "bots-project": lambda: code("toml", third_party.PROJECT),
    "bots-test": lambda: code("python", third_party.TEST),
    **{
        f"binding-{name}": functools.partial(binding_part, number)
        for number, name in enumerate(("imports", "run", "call", "tool", "framework"))
    },
}
"""Tables made from code alone."""


def vendors_table() -> str:
    """Format what is counted of each vendor's usage, measured against servers of their formats."""
    from tests.wire.run import results
    from tests.wire.table import vendors

    return vendors(results())


def stated_costs_tables() -> str:
    """Format which classes of frameworks hand on stated costs and served tiers, measured."""
    from tests.wire.stated import measured_tables

    return measured_tables()


def price_lists_table() -> str:
    """Format on which prices the installed list and a second one disagree."""
    from tests.price_lists.compare import explained_table

    return explained_table()


OBSERVED: Final[Mapping[str, Callable[[], str]]] = {"way": rooms.way_table}
"""Tables that need all frameworks."""


def with_tables(text: str, tables: Mapping[str, Callable[[], str]] = TABLES) -> str:
    """Return a page with its tables generated again, each between its markers."""
    for name, make in tables.items():
        markers = rf"<!-- {name}: [^\n]*-->\n(.*?)<!-- /{name} -->"
        found = re.search(markers, text, re.DOTALL)
        if found is not None:
            text = text[: found.start(1)] + make() + text[found.end(1) :]
    return text


def write(tables: Mapping[str, Callable[[], str]] = {**TABLES, **OBSERVED}) -> None:
    """Write tables of all pages."""
    for page in (README, INDEX, CONTRIBUTING, *PAGES):
        page.write_text(with_tables(page.read_text(encoding="utf-8"), tables), encoding="utf-8")


def write_vendors() -> None:
    """Write the tables that are measured against servers of each vendor; some minutes."""
    write(
        {
            "vendors": vendors_table,
            "stated-costs": stated_costs_tables,
            "price-lists": price_lists_table,
        }
    )
