"""Programs of agents under limits: the same outcome in every framework, and no cap is passed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, get_args

import pytest

from otel_limits import Limits, ModelCall
from otel_limits.testing import only
from tests.compositions.chance import concurrent, own, sequential
from tests.compositions.frameworks import FRAMEWORKS
from tests.compositions.of_langchain import LANGCHAIN
from tests.compositions.of_openai_agents import OPENAI_AGENTS
from tests.compositions.of_strands import STRANDS
from tests.compositions.program import Agent, Call, Program, Reply, Tool
from tests.compositions.run import problems, run
from tests.compositions.ways import BUILDERS

if TYPE_CHECKING:
    from tests.compositions.run import Framework

SEEDS = 2
"""Of each random test; the nightly tests have more."""

pytestmark = pytest.mark.filterwarnings("ignore")
each_framework = pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS)

LOOKS = (Tool(name="look"),)
LOOKING = (Reply(tools=("look", "look")),)


# --- random programs ------------------------------------------------------------------------------


@each_framework
def test_outcome_of_a_program_is_the_expected_one(framework: Framework) -> None:
    """To the model call: of every invocation the counts and the reason, and what is returned."""
    found = [
        (seed, each) for seed in range(SEEDS) for each in problems(sequential(seed), framework)
    ]
    assert found == []


@each_framework
def test_concurrent_agents_pass_no_cap(framework: Framework) -> None:
    """Tasks, threads, event loops in threads, and streams that are closed or left.

    Model calls, turns and tool calls never pass a cap except by one last answer, tokens by at most
    one call; every reservation is released, and every tree is the sum of its members.
    """
    found = [
        (seed, each) for seed in range(SEEDS) for each in problems(concurrent(seed), framework)
    ]
    assert found == []


def test_strands_own_compositions_pass_no_cap(source: str) -> None:
    """Graphs, swarms, background tools, resumes, validators and interrupts."""
    seeds = range(SEEDS) if source == "hooks" else range(SEEDS, 2 * SEEDS)
    found = [(seed, each) for seed in seeds for each in problems(own(seed, STRANDS), STRANDS)]
    assert found == []


def test_langchain_own_compositions_pass_no_cap() -> None:
    """Branches of a graph by `Send`, and interrupts."""
    seeds = range(SEEDS)
    found = [(seed, each) for seed in seeds for each in problems(own(seed, LANGCHAIN), LANGCHAIN)]
    assert found == []


def test_openai_agents_own_compositions_pass_no_cap() -> None:
    """Hand-offs, canceled streams, approvals, typed outputs, and tools that end a run."""
    made = [(seed, own(seed, OPENAI_AGENTS)) for seed in range(SEEDS)]
    found = [(seed, each) for seed, program in made for each in problems(program, OPENAI_AGENTS)]
    assert found == []


# --- programs by hand -----------------------------------------------------------------------------


def looking(name: str, **settings: Any) -> Agent:
    """An agent that uses a tool forever."""
    return Agent(**{"name": name, "replies": LOOKING, "tools": LOOKS, **settings})


def team(way: str, *children: Agent, replies: tuple[Reply, ...] = (), **settings: Any) -> Program:
    """A boss that calls all of its children forever, in one way."""
    called = tuple(each.name for each in children)
    tools = [Tool(name="ask", way=way, agents=called)]
    if way == "be":
        tools = [Tool(name=f"ask{each}", way=way, agents=(each,)) for each in called]
    asks = Reply(tools=tuple(each.name for each in tools))
    boss = Agent(name="boss", replies=replies or (asks,), tools=tuple(tools))
    return Program(agents=(boss, *children), is_concurrent=True, **settings)


SHARED = [
    (framework, way)
    for framework in FRAMEWORKS
    for way in BUILDERS
    if way not in ("look", "abandon")
]
OWN = [(name, way) for name, each in FRAMEWORKS.items() for way in each.own_ways]


@pytest.mark.parametrize(
    ("name", "way", "limit"),
    [
        (name, way, ("max_turns", "max_model_calls")[number % 2])
        for number, (name, way) in enumerate([*SHARED, *OWN])
    ],
)
def test_cap_of_a_tree_is_exact(name: str, way: str, limit: str) -> None:
    """However a tool calls agents, and however many run concurrently."""
    children = [looking(f"child{n}") for n in range(2 if way == "swarm" else 3)]
    program = team(way, *children, tree=only(limit, 7))
    seen, _ = run(program, FRAMEWORKS[name])
    assert seen.outcome.requests.total() == 7
    halted = "child0" if way == "handoff" else "boss"
    assert seen.outcome.stops == [(halted, limit, "halted")]


@pytest.mark.parametrize("way", ["be", "threads", "timers", "own pool", "old pool"])
@each_framework
def test_models_in_tools_count_for_the_tree(framework: Framework, way: str) -> None:
    """A tool calls models itself, in threads that know nothing of it, too."""
    model = Agent(name="helper", is_model=True)
    seen, _ = run(team(way, model, tree=Limits(max_model_calls=6)), framework)
    assert seen.outcome.requests == {"boss": 3, "helper": 3}
    sides = Counter((e.model, e.side) for e in seen.events if isinstance(e, ModelCall))
    assert sides == {("boss", False): 3, ("helper", True): 3}


@each_framework
def test_retries_share_the_budget(framework: Framework) -> None:
    """Every attempt to reach a busy vendor is a model call."""
    busy = (Reply(failure="busy"),)
    children = [looking(f"child{n}", replies=busy) for n in range(6)]
    seen, _ = run(team("be", *children, tree=Limits(max_model_calls=17)), framework)
    assert seen.outcome.requests.total() == 17


@pytest.mark.parametrize(
    ("outer", "inner", "made"),
    [("halt", "observe", {6}), ("observe", "halt", {2})],
)
@each_framework
def test_actions_within_each_other(framework: Framework, outer: Any, inner: Any, made: Any) -> None:
    """A tree acts as its owner says, whatever is within or around it."""
    replies = (*LOOKING * 7, Reply())
    limits: Any = {"limits": Limits(max_turns=2), "tree": Limits(max_turns=3), "action": inner}
    children = [looking(f"child{n}", replies=replies, **limits) for n in range(4)]
    asks = Reply(tools=tuple(f"askchild{n}" for n in range(4)))
    program = team("be", *children, replies=(asks, Reply()), tree=Limits(max_turns=6), action=outer)
    requests = run(program, framework)[0].outcome.requests
    each = {requests[child.name] for child in children}
    assert ({requests.total()} if outer == "halt" else each) == made


@each_framework
def test_one_last_answer_for_all_threads(framework: Framework) -> None:
    """Agents in several threads that wrap up have one last answer together."""
    children = [looking(f"child{n}") for n in range(4)]
    program = team("pool", *children, tree=Limits(max_turns=6), action="wrap_up")
    assert run(program, framework)[0].outcome.requests.total() in (6, 7)


HOWS = get_args(Call)
LIMITS = (Limits(max_turns=2), Limits(max_tool_calls=3), Limits(max_token_budget=10))


@pytest.mark.parametrize(
    ("framework", "action", "how", "limits"),
    [
        # Each two of them.
        (framework, action, HOWS[(f + a) % 3], LIMITS[(f + 2 * a) % 3])
        for f, framework in enumerate(FRAMEWORKS.values())
        for a, action in enumerate(("halt", "wrap_up", "raise"))
    ],
)
def test_conversation_goes_on_after_a_halt(
    framework: Framework, limits: Limits, action: Any, how: Call
) -> None:
    """Every tool has its result, and the next call has its own budget."""
    replies = (*LOOKING * 3, Reply(tokens=2), *LOOKING)
    agent = Agent(name="boss", replies=replies, tools=LOOKS)
    program = Program(agents=(agent,), limits=limits, action=action, calls=(how, how, how))
    assert problems(program, framework) == []
