"""The policy file: what it says to whom, what wins over it, and what becomes of a bad one."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
from decimal import Decimal
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from strands.multiagent import GraphBuilder

import otel_limits
from otel_limits import (
    ConfigurationError,
    Limits,
    LimitsPlugin,
    PolicyRead,
    Started,
    Stop,
    enable,
)
from otel_limits.cli import main
from otel_limits.core import price_lookup
from otel_limits.core.limits import LIMIT_NAMES, SHARED_LIMITS
from otel_limits.core.policy import Policy
from otel_limits.core.price_lookup import Prices
from otel_limits.core.usage import Usage
from otel_limits.runtime.enable import enable_leniently
from otel_limits.runtime.runtime import RUNTIME
from otel_limits.settings.policy.document import NO_DOCUMENT, SECTION_KEYS, Document
from otel_limits.settings.policy.file import PolicyFile
from otel_limits.settings.policy.reader import parse
from otel_limits.settings.settings_reader import read_settings
from otel_limits.testing import FakeTime, ScriptedModel, endless, says, uses
from tests.paths import ROOT
from tests.policy_schema import schema

if TYPE_CHECKING:
    from collections.abc import Callable

    from strands import Agent
    from strands.agent import AgentResult

    from otel_limits import Event
    from tests.conftest import MakeAgent, Metric

PAGE = ROOT / "otel_limits/docs/settings.md"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Write the policy file that the environment names."""
    path = tmp_path / "limits.yaml"
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))

    def write(text: str) -> Path:
        path.write_text(text)
        return path

    return write


@pytest.fixture
def later(fake_time: FakeTime) -> Callable[[], None]:
    """Let five seconds pass."""
    return lambda: fake_time.advance(5)


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture, faulty: None) -> Callable[[], list[str]]:
    """Errors that otel-limits has logged in this test so far."""
    return lambda: [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]


def understood(text: str) -> Document:
    """The policy of a valid file."""
    document, mistakes = parse(text, "limits.yaml")
    assert mistakes == ()
    return document


def refused(text: str) -> tuple[str, ...]:
    """The problems of a file."""
    document, mistakes = parse(text, "limits.yaml")
    assert document is NO_DOCUMENT
    return mistakes


PRICES = "models: {'*': {price: {input: 1, output: 1}}}\n"
"""Settings that a cost limit needs without an installed price list."""


def effective(text: str, agent: str = "tester", base: Policy | None = None) -> Policy:
    """The policy of an agent in a file."""
    return understood(text).effective(agent, base or Policy())


def runaway(make_agent: MakeAgent, **arguments: Any) -> Agent:
    """An agent that searches forever."""
    return make_agent(ScriptedModel(endless(uses("search"))), **arguments)


def readme_example() -> str:
    """The policy file that its page shows."""
    block = re.search(r"```yaml\n(# limits.yaml.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert block is not None
    return block[1]


def reason(result: AgentResult) -> str:
    """Why an invocation ended."""
    return result.stop_reason


def calls(agent: Agent) -> int:
    """Model calls of an agent with a scripted model so far."""
    assert isinstance(agent.model, ScriptedModel)
    return agent.model.calls


# --- what applies to whom -------------------------------------------------------------------------


def test_the_file_halts_an_agent(write: Callable[[str], Path], make_agent: MakeAgent) -> None:
    """A default cap halts a real agent that the file does not mention."""
    write("defaults: {limits: {max_turns: 3}}")
    enable()
    agent = runaway(make_agent)
    assert reason(agent("go")) == "max_turns"
    assert calls(agent) == 3


def test_an_agent_has_its_own_values(write: Callable[[str], Path], make_agent: MakeAgent) -> None:
    """A glob on its name gives an agent its cap and action, and leaves the others the defaults."""
    write(
        "defaults: {limits: {max_turns: 3}}\n"
        "agents: {'research-*': {limits: {max_turns: 2}, action: raise}}"
    )
    enable()
    with pytest.raises(otel_limits.MaxTurnsReachedException):
        runaway(make_agent, name="research-1")("go")
    assert runaway(make_agent, name="writer")("go").metrics.cycle_count == 3


def test_the_name_counts_when_the_invocation_begins(
    write: Callable[[str], Path], make_agent: MakeAgent
) -> None:
    """An agent that was renamed gets what its new name has."""
    write("agents: {quick: {limits: {max_turns: 1}}, slow: {limits: {max_turns: 4}}}")
    enable()
    agent = runaway(make_agent, name="quick")
    agent("go")
    agent.name = "slow"
    agent("go")
    assert calls(agent) == 1 + 4


def test_a_group_is_found_by_its_name(
    write: Callable[[str], Path], make_agent: MakeAgent, events: list[Event]
) -> None:
    """The budget tree of a graph is capped under the graph's id."""
    write("agents: {pipeline: {tree: {max_turns: 3}}}")
    enable(observers=[events.append])
    builder = GraphBuilder()
    builder.add_node(runaway(make_agent, name="first"), "first")
    builder.set_graph_id("pipeline").set_max_node_executions(1)
    builder.build()("go")
    (stop,) = (event for event in events if isinstance(event, Stop))
    assert (stop.reason, stop.turns) == ("max_turns", 3)


@pytest.mark.parametrize(
    ("agent", "turns"),
    [
        ("other", 1),
        ("research-9", 2),
        ("research-old-9", 3),
        ("research-old-1", 4),
        ("Research-9", 1),
    ],
)
def test_the_most_specific_glob_wins(agent: str, turns: int) -> None:
    """More letters win over fewer, a name over every glob, in any order in the file."""
    text = """
    agents:
      "research-old-1": {limits: {max_turns: 4}}
      "research-old-*": {limits: {max_turns: 3}}
      "research-*": {limits: {max_turns: 2}}
      "*": {limits: {max_turns: 1}}
    """
    assert effective(text, agent).limits.max_turns == turns


def test_a_name_wins_over_every_glob() -> None:
    """An exact name is more specific than a later glob of as many letters."""
    text = "agents: {ab: {limits: {max_turns: 1}}, 'ab*': {limits: {max_turns: 2}}}"
    assert [effective(text, agent).limits.max_turns for agent in ("ab", "abc")] == [1, 2]


def test_later_of_equally_specific_globs_wins() -> None:
    """Two globs with as many letters are taken in the order of the file."""
    text = "agents: {'a?': {limits: {max_turns: 1}}, '?b': {limits: {max_turns: 2}}}"
    assert effective(text, "ab").limits.max_turns == 2


def test_sections_are_merged_value_by_value() -> None:
    """Settings missing from a more specific section come from the less specific ones."""
    policy = effective(readme_example(), "research-archive")
    assert policy.limits == Limits(
        max_turns=60, max_cost_usd=Decimal("2.50"), max_calls_per_tool={"search_code": 20}
    )
    assert policy.tree == Limits(max_token_budget=500_000)
    assert (policy.action, policy.warn_at) == ("wrap_up", (0.5, 0.8))


def test_caps_of_single_tools_are_merged_tool_by_tool() -> None:
    """A cap for one tool leaves those of the others, wherever they come from."""
    base = Policy(limits=Limits(max_calls_per_tool={"fetch": 1, "search": 1, "write": 1}))
    text = """
    defaults: {limits: {max_calls_per_tool: {search: 2, write: 2}}}
    agents: {tester: {limits: {max_calls_per_tool: {write: 3}}}}
    """
    caps = {"fetch": 1, "search": 2, "write": 3}
    assert effective(text, base=base).limits.max_calls_per_tool == caps


def test_caps_of_the_tree_are_merged_as_well() -> None:
    """The file's caps of a budget tree leave those of the environment that it does not name."""
    base = Policy(tree=Limits(max_turns=1, max_token_budget=2))
    tree = effective("defaults: {tree: {max_turns: 3}}", base=base).tree
    assert tree == Limits(max_turns=3, max_token_budget=2)


def test_every_setting_of_an_agent_can_be_written() -> None:
    """Nothing that a policy holds is missing in the file."""
    by_tool = {"exempt_tools", "watched_tools", "actions_by_tool", "failures_by_tool"}
    here = {*SECTION_KEYS, *by_tool}
    # Neither the origin of a cap is a setting of an agent, nor its quotas are.
    assert here == set(Policy.__dataclass_fields__) - {"origins", "quotas"}


def test_every_setting_arrives() -> None:
    """Each setting besides the caps is taken from the file."""
    text = """
    defaults:
      action: ask
      warn_at: [0.9, 0.5, 0.9, 1]
      budget_hints: true
      nudge_disabled: true
      unmeasured: halt
      unpriced: halt
      tool_action: halt
      tool_failures: ["^ERR", timeout]
    """
    assert effective(text) == Policy(
        action="ask",
        tool_action="halt",
        tool_failures=("^ERR", "timeout"),
        warn_at=(0.5, 0.9, 1.0),
        budget_hints=True,
        nudge_disabled=True,
        unmeasured="halt",
        unpriced="halt",
    )


@pytest.mark.parametrize(("section", "names"), [("limits", LIMIT_NAMES), *SHARED_LIMITS.items()])
def test_every_limit_can_be_written(section: str, names: tuple[str, ...]) -> None:
    """Each limit of the code is one of the file, for invocations and for trees."""
    caps: dict[str, Any] = {name: {"search": 7} if "per_tool" in name else 7 for name in names}
    policy = effective(PRICES + yaml.safe_dump({"defaults": {section: caps}}))
    assert dict(getattr(policy, section).items()) == caps


def test_numbers_are_exact() -> None:
    """Money keeps its digits, and whole numbers may be written in groups."""
    text = (
        "defaults: {limits: {max_cost_usd: 2.50, max_turns: 1_000_000, max_duration_seconds: .5}}"
    )
    limits = effective(PRICES + text).limits
    assert str(limits.max_cost_usd) == "2.50"
    assert (limits.max_turns, limits.max_duration_seconds) == (1_000_000, 0.5)


# --- models and tools -----------------------------------------------------------------------------


def test_a_model_has_the_price_of_the_most_specific_glob() -> None:
    """A price is taken whole from one glob, in any order in the file."""
    document = understood(
        "models:\n"
        "  'gpt-4o*': {price: {input: 2.50, output: 10.00, cache_read: 1.25}}\n"
        "  'gpt-4o-mini*': {price: {input: 0.15, output: 0.60}}\n"
    )
    prices = Prices(document.price_list())
    usage = Usage(input=1_000_000, cache_read=400_000, output=100_000)
    assert prices.price("gpt-4o", usage) == Decimal("3.00")
    assert prices.price("gpt-4o-mini-2024", usage) == Decimal("0.21")


def test_an_exempt_tool_is_no_loop(write: Callable[[str], Path], make_agent: MakeAgent) -> None:
    """Loop limits ignore a tool that a glob exempts, unless a narrower one says otherwise."""
    write(
        "defaults: {limits: {max_consecutive_same_tool: 2, max_turns: 5}}\n"
        "tools: {'sea*': {exempt: true}}\n"
    )
    enable()
    assert reason(runaway(make_agent)("go")) == "max_turns"
    write(
        "defaults: {limits: {max_consecutive_same_tool: 2, max_turns: 5}}\n"
        "tools: {'sea*': {exempt: true}, search: {exempt: false}}"
    )
    enable()
    assert reason(runaway(make_agent)("go")) == "loop_detected"


def test_the_file_decides_on_exemptions_of_the_environment() -> None:
    """A tool that the environment exempts is watched when the file says so."""
    base = Policy(exempt_tools=frozenset({"wait", "poll"}))
    policy = effective("tools: {wait: {exempt: false}}", base=base)
    assert [policy.exempts(tool) for tool in ("wait", "poll", "search")] == [False, True, False]


def test_quotas_are_known_by_name_with_their_line() -> None:
    """The part about quotas is read like all others."""
    quotas = understood("defaults: {}\nquotas:\n  day:\n    {tokens: 5, window: day}\n").quotas
    assert {name: (entry.value.amount, entry.line) for name, entry in quotas.items()} == {
        "day": (5, 3)
    }


# --- what wins ------------------------------------------------------------------------------------


def test_each_cap_comes_from_the_first_source(
    write: Callable[[str], Path],
    make_agent: MakeAgent,
    events: list[Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plugin, file, argument, environment, preset: cap by cap, in this order."""
    monkeypatch.setenv("OTEL_LIMITS_PRESET", "recommended")
    for number, name in enumerate(("turns", "tool_calls", "input_tokens", "output_tokens"), 41):
        monkeypatch.setenv(f"OTEL_LIMITS_MAX_{name.upper()}", str(number))
    write("defaults: {limits: {max_turns: 21, max_tool_calls: 22}}")
    enable(Limits(max_turns=31, max_tool_calls=32, max_input_tokens=33), observers=[events.append])
    model = ScriptedModel([says("done")])
    make_agent(model, plugins=[LimitsPlugin(Limits(max_turns=11))])("go")
    (started,) = (event for event in events if isinstance(event, Started))
    assert started.limits == Limits(
        max_turns=11,
        max_tool_calls=22,
        max_input_tokens=33,
        max_output_tokens=44,
        max_iterations=25,
        max_model_calls=100,
        max_identical_tool_calls=5,
        max_consecutive_tool_failures=5,
        max_consecutive_handoffs=20,
    )


@pytest.mark.parametrize(
    ("agent", "plugin", "expected"),
    [
        ("other", None, "observed"),
        ("tester", None, "halted"),
        ("tester", "raise", "raised"),
    ],
)
def test_action_comes_from_the_first_source(
    agent: str,
    plugin: Any,
    expected: str,
    write: Callable[[str], Path],
    make_agent: MakeAgent,
    events: list[Event],
) -> None:
    """An action in the plugin wins over the file's, and that over the argument's."""
    write("agents: {tester: {action: halt}}")
    enable(action="observe", observers=[events.append])
    plugins = [] if plugin is None else [LimitsPlugin(action=plugin)]
    make_agent(ScriptedModel([says("done")]), name=agent, plugins=plugins)("go")
    (started,) = (event for event in events if isinstance(event, Started))
    assert started.action == expected


def test_rows_say_where_each_value_comes_from() -> None:
    """Every effective setting of an agent has its line, or the variable or default behind it."""
    text = """
defaults: {limits: {max_turns: 30, max_calls_per_tool: {fetch: 1}}}
agents:
  "research-*":
    limits:
      max_turns: 20
models:
  "m*": {price: {input: 1, output: 2}}
tools:
  "poll_*": {exempt: true}
"""
    reading = read_settings(
        {
            "OTEL_LIMITS_MAX_TOOL_CALLS": "9",
            "OTEL_LIMITS_MAX_CALLS_PER_TOOL": "fetch=5,search=7",
            "OTEL_LIMITS_MAX_TURNS": "50",
        }
    )
    rows = {
        row.name: (row.value, row.source)
        for row in understood(text).rows(reading.values, reading.sources, "research-1")
    }
    assert rows["max_turns"] == (20, "policy limits.yaml:6")
    assert rows["max_tool_calls"] == (9, "environment")
    assert rows["max_calls_per_tool.fetch"] == (1, "policy limits.yaml:2")
    assert rows["max_calls_per_tool.search"] == (7, "environment")
    assert rows["max_iterations"] == (None, "default")
    assert rows['tools["poll_*"].exempt'] == (True, "policy limits.yaml:10")
    assert rows['models["m*"].price'] == ({"input": 1, "output": 2}, "policy limits.yaml:8")


def test_caps_of_single_tools_have_a_row_each() -> None:
    """The row that says that there are none is only there where there are none."""
    reading = read_settings({})

    def names(text: str) -> list[str]:
        rows = understood(text).rows(reading.values, reading.sources)
        return [row.name for row in rows if "per_tool" in row.name]

    failures = "max_consecutive_failures_per_tool"
    assert names("defaults: {}") == ["max_calls_per_tool", failures]
    text = "defaults: {limits: {max_calls_per_tool: {fetch: 1}}}"
    assert names(text) == [failures, "max_calls_per_tool.fetch"]


def test_rows_without_a_name_are_those_of_everybody() -> None:
    """Without an agent only the defaults are shown."""
    reading = read_settings({})
    document = understood("agents: {'*': {limits: {max_turns: 2}}}")
    rows = {row.name: row.source for row in document.rows(reading.values, reading.sources)}
    assert rows["max_turns"] == rows["max_calls_per_tool"] == "default"


# --- mistakes -------------------------------------------------------------------------------------

WHOLE = "must be a whole number of 1 or more"

WRONG = {
    "defalts: {}": "Unknown key defalts. Did you mean defaults?",
    "nonsense: {}": "Unknown key nonsense. Valid keys: defaults, agents, models, tools, quotas.",
    "defaults: {limit: {}}": "Unknown key defaults.limit. Did you mean limits?",
    "defaults: {limits: {max_turn: 1}}": (
        "Unknown key defaults.limits.max_turn. Did you mean max_turns?"
    ),
    "agents: {a: {max_turns: 3}}": ('Unknown key agents["a"].max_turns. Write it under "limits:".'),
    "agents: {a: {tree_max_turns: 3}}": 'Write max_turns under "tree:".',
    "max_turns: 3": 'Write it under "defaults: limits:".',
    "models: {m: {input: 1}}": 'Write it under "price:".',
    "defaults: {tree: {max_iterations: 1}}": "Unknown key defaults.tree.max_iterations.",
    "agents: {a: {limits: {max_turns: 0}}}": f'agents["a"].limits.max_turns {WHOLE}, got 0.',
    "defaults: {limits: {max_turns: -1}}": f"defaults.limits.max_turns {WHOLE}, got -1.",
    "defaults: {limits: {max_turns: 2.5}}": f"defaults.limits.max_turns {WHOLE}, got 2.5.",
    "defaults: {limits: {max_turns: '5'}}": f"defaults.limits.max_turns {WHOLE}, got '5'.",
    "defaults: {limits: {max_turns: true}}": f"defaults.limits.max_turns {WHOLE}, got true.",
    "defaults: {limits: {max_turns: 010}}": f"defaults.limits.max_turns {WHOLE}, got '010'.",
    "defaults: {limits: {max_turns: 1__0}}": f"defaults.limits.max_turns {WHOLE}, got '1__0'.",
    "defaults: {limits: {max_turns: 0x10}}": f"defaults.limits.max_turns {WHOLE}, got '0x10'.",
    "defaults: {limits: {max_turns: }}": f"defaults.limits.max_turns {WHOLE}, got nothing.",
    "defaults: {limits: {max_turns: null}}": f"defaults.limits.max_turns {WHOLE}, got nothing.",
    "defaults: {limits: {max_turns: [1, [2]]}}": f"max_turns {WHOLE}, got [1, a list].",
    "defaults: {limits: {max_turns: {a: 1}}}": f"max_turns {WHOLE}, got a mapping.",
    "defaults: {limits: {max_cost_usd: 0.00}}": (
        "max_cost_usd must be an amount of USD above 0, such as 0.50, got 0.00."
    ),
    "defaults: {limits: {max_cost_usd: .inf}}": "such as 0.50, got '.inf'.",
    "defaults: {limits: {max_cost_usd: [1]}}": "max_cost_usd must be an amount of USD above 0",
    "defaults: {limits: {max_duration_seconds: 1:30}}": "a number of seconds above 0, got '1:30'.",
    "defaults: {limits: {max_duration_seconds: 0.0}}": "a number of seconds above 0, got 0.0.",
    "defaults: {limits: {max_no_progress_turns: -1}}": "or 0 to switch it off, got -1.",
    "defaults: {limits: {max_calls_per_tool: 5}}": (
        "max_calls_per_tool must be a mapping, such as search: 20, fetch: 5, got 5."
    ),
    # Only text that would be valid without its quotes.
    'defaults: {limits: {max_turns: "6"}}': f"{WHOLE}, got '6'. Write it without quotes.",
    'defaults: {limits: {max_turns: "0"}}': f"{WHOLE}, got '0'. Unset means no limit.",
    'defaults: {limits: {max_cost_usd: "0.5"}}': "got '0.5'. Write it without quotes.",
    'defaults: {budget_hints: "true"}': "got 'true'. Write it without quotes.",
    "defaults: {limits: {max_calls_per_tool: {search: 0}}}": (
        f'defaults.limits.max_calls_per_tool["search"] {WHOLE}, got 0.'
    ),
    "defaults: {action: stop}": "defaults.action must be one of observe, halt, wrap_up, raise, ask",
    "defaults: {action: [halt]}": "raise, ask, got ['halt'].",
    "defaults: {warn_at: 0.5}": "(in a file [0.5, 0.8]), got 0.5.",
    "defaults: {warn_at: []}": "one or more fractions above 0 and up to 1, such as 0.5,0.8 "
    "(in a file [0.5, 0.8]), got [].",
    "defaults: {warn_at: [0.5, 1.5]}": "(in a file [0.5, 0.8]), got [0.5, 1.5].",
    "defaults: {warn_at: [true]}": "(in a file [0.5, 0.8]), got [true].",
    "defaults: {budget_hints: yes}": "defaults.budget_hints must be true or false, got 'yes'.",
    "defaults: []": "defaults must be a mapping, such as limits: {max_turns: 30}, got [].",
    "defaults:": "defaults must be a mapping, such as limits: {max_turns: 30}, got nothing.",
    "agents: {a: 5}": 'agents["a"] must be a mapping, got 5.',
    "models: {m: {price: {input: 1}}}": 'models["m"].price needs output: USD per million output',
    "models: {m: {price: {input: 1, output: -1}}}": 'models["m"].price.output must be USD per',
    "models: {m: {prices: {}}}": 'Unknown key models["m"].prices. Did you mean price?',
    "tools: {t: {exempt: 1}}": 'tools["t"].exempt must be true or false, got 1.',
    "- 1": "The file must be a mapping, got a list.",
    "null": "The file must be a mapping, got nothing.",
    "": "The file is empty.",
    "# only a comment": "The file is empty.",
    "defaults: {limits: {max_turns: 1, max_turns: 2}}": (
        "Duplicate key 'max_turns', first on line 1."
    ),
    "? [a]\n: 1": "A key must be a single word or text.",
    '"\\ud800": 1': "The key '\\ud800' contains half a character.",
    "tools: {'[key]': {exempt: 1}}": 'tools["[key]"].exempt must be true or false, got 1.',
    "agents: {'[key]': 1}": 'agents["[key]"] must be a mapping, got 1.',
    "defaults: {": "Invalid YAML: while parsing a flow node",
    "defaults: *gone": "Invalid YAML: found undefined alias 'gone'.",
    "a: 1\n---\nb: 2": "Invalid YAML: expected a single document in the stream",
    "defaults: &x {limits: *x}": "An alias refers to its own parent.",
    "defaults: \x07": "The file has a character that is not allowed in YAML.",
    "[" * 1000: "The file is nested too deeply to be read.",
    "tools: {t: !thing {}}": "The tag !thing is not allowed: plain YAML only.",
    "quotas: {q: {model_calls: 1, window: day, max_wait: 5m}}": "has a max_wait but refuses calls",
    "quotas: {q: {model_calls: 1, window: day, reserve: expected}}": "remove reserve.",
}


@pytest.mark.parametrize(("text", "sentence"), WRONG.items(), ids=[key[:40] for key in WRONG])
def test_a_mistake_is_a_sentence(text: str, sentence: str) -> None:
    """It names file, line and key, says what may be there, and shows what is."""
    mistake = refused(text)[0]
    assert mistake.startswith("limits.yaml:")
    assert sentence in mistake


def test_all_mistakes_are_reported_together() -> None:
    """All of them, in the order of the lines."""
    text = """\
defaults:
  limits:
    max_turns: 0
    max_turn: 1
  action: stop
agents:
  "a": {limits: {max_cost_usd: -1}}
  "a": {}
models:
  "m":
    price:
      input: free
tools: 5
extra: 1
"""
    lines = [int(mistake.split(":")[1]) for mistake in refused(text)]
    assert lines == [3, 4, 5, 7, 8, 11, 12, 13, 14]


def test_no_object_is_made(tmp_path: Path) -> None:
    """A tag that would run something is a mistake, and runs nothing."""
    trace = tmp_path / "ran"
    text = f"defaults: !!python/object/apply:os.mkdir ['{trace}']"
    assert "The tag !!python/object/apply:os.mkdir is not allowed" in refused(text)[0]
    assert not trace.exists()


def test_an_alias_is_the_value_it_stands_for() -> None:
    """A section can be written once and used twice, each at its own line."""
    text = "agents:\n  a: &heavy {limits: {max_turns: 5}}\n  b: *heavy\n"
    assert effective(text, "b").limits.max_turns == 5


def test_aliases_of_aliases_are_read_in_no_time() -> None:
    """Ten levels of ten aliases are refused for what they are, not multiplied out."""
    levels = ["l0: &l0 [x, x]"]
    levels += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert len(refused("\n".join([*levels, "defaults: {limits: {max_turns: *l11}}"]))) == 1
    assert len(refused("\n".join([*levels, "quotas: {q: {window: day, tokens: *l11}}"]))) == 1


def test_a_cost_limit_needs_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on cost that no price can trip is a mistake; prices of the file are enough."""
    monkeypatch.setattr(price_lookup, "installed_version", lambda: None)
    text = """\
defaults: {limits: {max_cost_usd: 1}}
agents: {a: {tree: {max_cost_usd: 2}}}
"""
    assert [mistake.partition(" needs prices")[0] for mistake in refused(text)] == [
        "limits.yaml:1: defaults.limits.max_cost_usd",
        'limits.yaml:2: agents["a"].tree.max_cost_usd',
    ]
    understood(text + "models: {m: {price: {input: 1, output: 2}}}")


def test_enable_raises_every_mistake(
    write: Callable[[str], Path], make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistakes of the file and of the environment come together, and nothing is switched on."""
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "none")
    path = write("defaults: {limits: {max_turns: 0}, action: stop}")
    with pytest.raises(ConfigurationError) as caught:
        enable()
    assert [m.split(" must ")[0] for m in caught.value.mistakes] == [
        "OTEL_LIMITS_MAX_TURNS",
        f"{path}:1: defaults.limits.max_turns",
        f"{path}:1: defaults.action",
    ]
    agent = make_agent(ScriptedModel([says("done")]))
    assert reason(agent("go")) == "end_turn"
    assert not RUNTIME.is_on


def test_a_missing_file_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that leads nowhere does not quietly mean no limit."""
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(tmp_path / "gone.yaml"))
    with pytest.raises(ConfigurationError, match=r"gone\.yaml cannot be read: No such file"):
        enable()


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    """What is there and cannot be read is said with the reason."""
    (mistake,) = PolicyFile(str(tmp_path)).mistakes
    assert mistake == f"{tmp_path} cannot be read: Is a directory."


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    """Only UTF-8 is read, with or without a byte order mark."""
    path = tmp_path / "limits.yaml"
    path.write_bytes("defaults:\n  action: hält".encode("latin-1"))
    assert PolicyFile(str(path)).mistakes == (f"{path}:2: The file is not UTF-8 text.",)
    path.write_bytes(b"\xef\xbb\xbfdefaults: {action: raise}")
    assert PolicyFile(str(path)).document.effective("a", Policy()).action == "raise"


def test_a_bad_file_leaves_the_rest_in_force(
    write: Callable[[str], Path],
    make_agent: MakeAgent,
    monkeypatch: pytest.MonkeyPatch,
    metric: Metric,
    errors: Callable[[], list[str]],
) -> None:
    """Where nothing may be raised it is logged as an error and counted; the environment applies."""
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "2")
    path = write("defaults: {limits: {max_turns: 1}, action: stop}")
    enable_leniently("instrumentor")
    (error,) = errors()
    assert error.startswith(f"otel-limits: {path}:1: defaults.action must be one of")
    assert error.endswith("The policy file is ignored; all other settings apply.")
    assert metric("otel_limits_internal_errors_total", component="policy") == 1
    assert metric("otel_limits_policy_valid") == 0
    assert runaway(make_agent)("go").metrics.cycle_count == 2


# --- changes on disk ------------------------------------------------------------------------------


def test_a_new_version_applies_to_new_invocations(
    write: Callable[[str], Path], make_agent: MakeAgent, later: Callable[[], None], metric: Metric
) -> None:
    """Five seconds after it was written, an invocation begins under it."""
    write("defaults: {limits: {max_turns: 2}}")
    enable()
    agent = runaway(make_agent)
    agent("go")
    write("defaults: {limits: {max_turns: 5}}")
    later()
    agent("go")
    assert calls(agent) == 2 + 5
    assert metric("otel_limits_policy_valid") == 1


def test_an_invocation_keeps_what_it_began_with(
    write: Callable[[str], Path], make_agent: MakeAgent, later: Callable[[], None]
) -> None:
    """A file that changes while the model is at work does not reach into the invocation."""
    write("defaults: {limits: {max_turns: 4}}")
    enable()

    def script() -> Any:
        yield uses("search")
        write("defaults: {limits: {max_turns: 2}}")
        later()
        yield from endless(uses("search"))

    agent = make_agent(ScriptedModel(script()))
    assert agent("go").metrics.cycle_count == 4
    agent("go")
    assert calls(agent) == 4 + 2


def test_quotas_that_cannot_be_held_leave_the_limits_in_force(
    write: Callable[[str], Path],
    make_agent: MakeAgent,
    later: Callable[[], None],
    metric: Metric,
    errors: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new version's settings besides limits fail as an internal error, and are logged."""
    monkeypatch.setitem(sys.modules, "otel_limits.quotas.setup", None)
    write("defaults: {limits: {max_turns: 5}}")
    enable()
    write("{defaults: {limits: {max_turns: 2}}, quotas: {q: {model_calls: 9, window: day}}}")
    later()
    faults = metric("otel_limits_internal_errors_total", component="quotas")
    assert runaway(make_agent)("go").metrics.cycle_count == 2
    assert metric("otel_limits_internal_errors_total", component="quotas") == faults + 1
    assert "quotas failed with ModuleNotFoundError" in errors()[0]


def test_file_is_checked_every_second(tmp_path: Path) -> None:
    """Between two looks a change is not seen, whatever is asked."""
    path, now = tmp_path / "limits.yaml", [100.0]
    path.write_text("defaults: {action: halt}")
    file = PolicyFile(str(path), clock=lambda: now[0])

    def action_at(moment: float) -> str:
        now[0] = moment
        file.refresh()
        return file.document.effective("a", Policy()).action

    path.write_text("defaults: {action: raise}")
    assert [action_at(moment) for moment in (100.9, 101.0)] == ["halt", "raise"]
    path.write_text("defaults: {action: observe}")
    assert [action_at(moment) for moment in (101.9, 102.0)] == ["raise", "observe"]


def test_an_invalid_version_is_refused(
    write: Callable[[str], Path],
    make_agent: MakeAgent,
    later: Callable[[], None],
    metric: Metric,
    errors: Callable[[], list[str]],
    events: list[Event],
) -> None:
    """The previous version stays in effect; log, metric and event report it once."""
    write("defaults: {limits: {max_turns: 2}}")
    enable(observers=[events.append])
    agent = runaway(make_agent)
    path = write("defaults: {limits: {max_turns: 0, max_turn: 1}}")
    for _ in range(3):
        later()
        agent("go")
    assert calls(agent) == 3 * 2
    assert [error.split(" ")[1] for error in errors()] == [f"{path}:1:"] * 2
    assert all("The previous version still applies." in error for error in errors())
    assert metric("otel_limits_internal_errors_total", component="policy") == 1
    assert metric("otel_limits_policy_valid") == 0
    write("defaults: {limits: {max_turns: 3}}")
    later()
    agent("go")
    assert calls(agent) == 3 * 2 + 3
    assert metric("otel_limits_policy_valid") == 1
    read = [event.valid for event in events if isinstance(event, PolicyRead)]
    assert read == [True, False, True]


def test_identical_version_is_not_reported_again(
    write: Callable[[str], Path],
    make_agent: MakeAgent,
    later: Callable[[], None],
    errors: Callable[[], list[str]],
) -> None:
    """A refused file that is merely touched is no new version."""
    write("defaults: {}")
    enable()
    for modified in (1, 2, 3):
        os.utime(write("defaults: 5"), (modified, modified))
        later()
        make_agent(ScriptedModel([says("done")]))("go")
    assert len(errors()) == 1


@pytest.mark.parametrize(
    "reason", ["No such file or directory", "Too many levels of symbolic links"]
)
def test_a_file_that_vanishes_stays_in_force(
    reason: str,
    write: Callable[[str], Path],
    make_agent: MakeAgent,
    later: Callable[[], None],
    metric: Metric,
    errors: Callable[[], list[str]],
) -> None:
    """Its settings are kept, its absence logged once, and its return noticed."""
    path = write("defaults: {limits: {max_turns: 2}}")
    enable()
    path.unlink()
    if "links" in reason:
        path.symlink_to(path)
    agent = runaway(make_agent)
    for _ in range(2):
        later()
        agent("go")
    assert calls(agent) == 2 * 2
    assert len(errors()) == 1
    assert f"{path} cannot be read: {reason}. The previous version" in errors()[0]
    assert metric("otel_limits_policy_valid") == 0
    path.unlink(missing_ok=True)
    write("defaults: {limits: {max_turns: 2}}")
    later()
    agent("go")
    assert metric("otel_limits_policy_valid") == 1


def test_a_file_that_was_bad_at_the_start_is_taken_once_mended(
    write: Callable[[str], Path],
    make_agent: MakeAgent,
    later: Callable[[], None],
    errors: Callable[[], list[str]],
) -> None:
    """The process need not be restarted."""
    write("defaults: 5")
    enable_leniently("instrumentor")
    write("defaults: {limits: {max_turns: 2}}")
    later()
    assert reason(runaway(make_agent)("go")) == "max_turns"
    assert len(errors()) == 1


def test_one_thread_looks_and_the_others_go_on(
    write: Callable[[str], Path], later: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the file is being read, an invocation begins with what is known, without waiting."""
    write("defaults: {action: observe}")
    enable()
    path = write("defaults: {action: raise}")
    later()
    seen, open_file = list[str](), os.open

    def open_slowly(name: Any, *how: Any) -> int:
        if name == str(path) and threading.current_thread() is threading.main_thread():
            later()
            other = threading.Thread(target=lambda: seen.append(RUNTIME.policy("tester").action))
            other.start()
            other.join()
        return open_file(name, *how)

    monkeypatch.setattr(os, "open", open_slowly)
    assert (RUNTIME.policy("tester").action, seen) == ("raise", ["observe"])


def test_switching_off_forgets_the_file(write: Callable[[str], Path]) -> None:
    """After disable() the file has no effect."""
    write("defaults: {action: observe}")
    enable()
    otel_limits.disable()
    assert RUNTIME.policy("tester").action == "halt"


# --- the command line -----------------------------------------------------------------------------


def test_check_shows_what_applies_to_an_agent(
    write: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`otel-limits check --agent` names the line behind each value."""
    monkeypatch.setenv("OTEL_LIMITS_MAX_TOOL_CALLS", "9")
    path = write(
        "defaults: {limits: {max_turns: 30}}\n"
        "agents: {'research-*': {limits: {max_turns: 20, max_calls_per_tool: {search: 4}}}}\n"
        "models: {'gpt-4o*': {price: {input: 2.50, output: 10.00}}}\n"
    )
    assert main(["check", "--all", "--agent", "research-1"]) == 0
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    shown = {name: (value, source) for name, value, source in lines}
    assert shown["OTEL_LIMITS_MAX_TURNS"] == ("20", f"policy {path}:2")
    assert shown["max_calls_per_tool.search"] == ("4", f"policy {path}:2")
    assert shown["OTEL_LIMITS_MAX_TOOL_CALLS"] == ("9", "environment")
    assert shown["OTEL_LIMITS_MAX_ITERATIONS"] == ("unset", "default")
    assert shown['models["gpt-4o*"].price'] == ("input=2.50,output=10.00", f"policy {path}:3")
    assert main(["check"]) == 0
    assert re.search(rf"MAX_TURNS +30 +policy {re.escape(str(path))}:1", capsys.readouterr().out)


def test_check_lists_the_mistakes_of_the_file(
    write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each on a separate line, and the status is 1."""
    path = write("defaults: {action: stop}\nextra: 1")
    assert main(["check"]) == 1
    *mistakes, _, unlimited = capsys.readouterr().err.splitlines()
    assert [s.split(" ")[1] for s in mistakes] == [f"{path}:1:", f"{path}:2:"]
    assert unlimited == f"otel-limits: {path} was rejected, so none of its limits apply."


def test_run_refuses_a_bad_file(
    write: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program is not started with an invalid file, even if it is named by an option."""
    write("defaults: {}")
    bad = tmp_path / "bad.yaml"
    bad.write_text("defaults: 5")
    assert main(["run", "--policy", str(bad), "--", "true"]) == 2
    assert capsys.readouterr().err == (
        f"otel-limits: {bad}:1: defaults must be a mapping, such as limits: {{max_turns: 30}}, "
        "got 5.\n"
    )


# --- the schema -----------------------------------------------------------------------------------


@cache
def validator() -> jsonschema.Draft7Validator:
    """Return the validator of an editor with our schema."""
    return jsonschema.Draft7Validator(schema())


def accepts(text: str) -> bool:
    """Whether an editor with our schema finds nothing to complain about."""
    return bool(validator().is_valid(yaml.safe_load(text)))


def test_the_shipped_schema_is_the_generated_one() -> None:
    """Run `python -m tests.generate schema` when this fails."""
    shipped = resources.files("otel_limits").joinpath("policy.schema.json").read_text("utf-8")
    assert json.loads(shipped) == schema()
    jsonschema.Draft7Validator.check_schema(schema())


def test_every_key_of_the_schema_is_described() -> None:
    """An editor can say what each key is for."""

    def undescribed(part: Any, key: str = "") -> list[str]:
        found = [
            f"{key}.{name}"
            for name, each in part.get("properties", {}).items()
            if name != "price" and not each.get("description", "").endswith(".")
        ]
        children = {**part.get("properties", {}), **part.get("$defs", {})}
        below = part.get("additionalProperties")
        children |= {"*": below} if isinstance(below, dict) else {}
        return found + [
            each for name, child in children.items() for each in undescribed(child, f"{key}.{name}")
        ]

    assert undescribed(schema()) == []


def test_the_example_of_the_readme_is_valid() -> None:
    """It is taken, and the schema has nothing against it."""
    assert understood(readme_example()).agents.keys() == {"research-*", "research-archive"}
    assert accepts(readme_example())


YAML_ITSELF = re.compile(
    "Invalid YAML|Duplicate key|alias|tag|character|nested|single word|010|0x10|1__0|1:30|'yes'|inf"
)
"""Problems beyond a schema: mistakes in the text, and YAML 1.1's numbers."""


@pytest.mark.parametrize(
    "text", [text for text, sentence in WRONG.items() if not YAML_ITSELF.search(sentence)]
)
def test_the_schema_refuses_what_the_reader_refuses(text: str) -> None:
    """An editor marks each mistake before the file is used."""
    assert not accepts(text)


scalars = st.one_of(
    st.integers(-2, 3),
    st.sampled_from([0.5, 1.5, -0.5, True, False, None, "halt", "5", "true", "gone"]),
)
values = st.one_of(
    scalars,
    st.lists(scalars, max_size=2),
    st.dictionaries(st.sampled_from(["search", "input", "output"]), scalars, max_size=3),
)
caps = st.dictionaries(st.sampled_from([*LIMIT_NAMES, "max_turn"]), values, max_size=3)
sections = st.fixed_dictionaries(
    {},
    optional={key: caps if key in ("limits", *SHARED_LIMITS) else values for key in SECTION_KEYS},
)
files = st.fixed_dictionaries(
    {},
    optional={
        "defaults": sections,
        "agents": st.dictionaries(st.sampled_from(["a", "b*"]), sections, max_size=2),
        "models": st.dictionaries(
            st.sampled_from(["m", "n*"]), st.fixed_dictionaries({}, optional={"price": values})
        ),
        "tools": st.dictionaries(
            st.sampled_from(["t", "u*"]), st.fixed_dictionaries({}, optional={"exempt": values})
        ),
    },
)


@hypothesis.settings(max_examples=60)
@given(files)
def test_schema_and_reader_agree(file: dict[str, Any]) -> None:
    """For any input, both accept it or both reject it."""
    text = yaml.safe_dump(file)
    assert accepts(text) == (parse(text, "limits.yaml")[1] == ())


QUOTA: dict[str, list[Any]] = {
    "tokens": [5, 0, "5", {"default": 1}, {"pro": 1}],
    "usd": [1],
    "model_calls": [3],
    "concurrency": [2],
    "window": ["PT1M"],
    "pace": ["window", "smooth"],
    "burst": [2],
    "time_zone": ["UTC"],
    "key": ["agent"],
    "keys": [{"a": 1}, {}],
    "where": [{"agent": "n*"}, {"agent": 1}, {}],
    "on_exceeded": ["wait", "refuse"],
    "max_wait": ["5m", 5],
    "fair_by": ["agent"],
    "reserve": ["expected"],
    "on_lost": ["charge", "keep"],
    "grace": [0, "5m"],
}
quotas = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from(choices) for name, choices in QUOTA.items()}
)


@hypothesis.settings(max_examples=150)
@given(quotas)
def test_schema_and_reader_agree_about_quotas(quota: dict[str, Any]) -> None:
    """Both also know which keys need or exclude others."""
    if isinstance(quota.get("tokens"), dict):
        quota |= {"plan": "attribute.plan"}
    text = PRICES + yaml.safe_dump({"quotas": {"q": quota}})
    assert accepts(text) == (parse(text, "limits.yaml")[1] == ())


def test_names_of_tools_include_those_that_one_agent_caps() -> None:
    """Each has its own label in metrics."""
    text = "agents: {bot: {limits: {max_calls_per_tool: {fetch: 2}}}}"
    assert parse(text, "limits.yaml")[0].names.tools == {"fetch"}


@pytest.mark.parametrize(
    ("before", "after", "loosened"),
    [
        ("{max_turns: 3}", "{max_turns: 4}", ("all agents: max_turns 3 -> 4",)),
        ("{max_turns: 3}", "{}", ("all agents: max_turns 3 -> no limit",)),
        ("{max_turns: 3}", "{max_turns: 2, max_model_calls: 9}", ()),
        (
            "{max_calls_per_tool: {a: 1, b: 2}}",
            "{max_calls_per_tool: {b: 2}}",
            ("all agents: max_calls_per_tool.a 1 -> no limit",),
        ),
        (
            "{max_identical_tool_calls: 3}",
            "{max_identical_tool_calls: 0}",
            ("all agents: max_identical_tool_calls 3 -> no limit",),
        ),
        ("{max_consecutive_failures_per_tool: {ssh: 0}}", "{max_turns: 3}", ()),
    ],
)
def test_reload_that_loosens_a_limit_is_a_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    events: list[Event],
    before: str,
    after: str,
    loosened: tuple[str, ...],
) -> None:
    """A shell tool of an agent may have written the new version."""
    path, now = tmp_path / "limits.yaml", [0.0]
    path.write_text(f"defaults: {{limits: {before}}}")
    enable(observers=[events.append])
    file = PolicyFile(str(path), clock=lambda: now[0])
    path.write_text(f"defaults: {{limits: {after}}} # another version")
    now[0] += 2
    file.refresh()
    (read,) = [event for event in events if isinstance(event, PolicyRead)]
    assert read.loosened == loosened
    assert caplog.text.count("loosens a limit") == len(loosened)


def test_reload_is_compared_with_what_applies_without_the_file(
    tmp_path: Path, events: list[Event]
) -> None:
    """A limit of the environment takes the place of a removed one; `observe` ends all of them."""
    path, now = tmp_path / "limits.yaml", [0.0]
    path.write_text(
        "{agents: {a: {limits: {max_turns: 3}}, b: {limits: {max_turns: 3}}},"
        " tools: {poll_orders: {exempt: false}}}"
    )
    enable(observers=[events.append])
    file = PolicyFile(str(path), clock=lambda: now[0])
    path.write_text("agents: {b: {limits: {max_turns: 3}, action: observe}}")
    now[0] += 2
    file.refresh(Policy(limits=Limits(max_turns=2), exempt_tools=frozenset({"poll_*"})))
    (read,) = [event for event in events if isinstance(event, PolicyRead)]
    assert read.loosened == (
        "agent 'b': action halt -> observe",
        'tools["poll_orders"].exempt false -> true',
    )
