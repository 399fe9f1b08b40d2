"""Random compositions of agents, and what has to hold of each: for tests alone."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from opentelemetry import context as otel_context
from strands import Agent, ModelRetryStrategy, tool
from strands.hooks import AfterInvocationEvent, AfterModelCallEvent
from strands.multiagent import GraphBuilder, Swarm
from strands.tools.executors import SequentialToolExecutor
from strands.types.exceptions import ModelThrottledException

import otel_limits
from otel_limits import Halt, Limits, LimitsPlugin, ModelCall, Stop
from otel_limits.core.events import CUT_SHORT
from otel_limits.runs.registry import LIVE
from otel_limits.runs.tree import CURRENT, TASK_SCOPE
from otel_limits.testing import Answer, endless, fails, says
from tests.books import Books
from tests.metered import Metered

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator

    from strands.background_tasks import BackgroundTasksConfig
    from strands.types.content import Messages

    from otel_limits import Breach, Event
    from otel_limits.core.policy import Action
    from otel_limits.runs.budget import Budget

ACTIONS: tuple[Action, ...] = ("halt", "halt", "wrap_up", "raise", "ask", "observe")
CAPS = {
    "max_turns": (1, 8),
    "max_model_calls": (1, 10),
    "max_token_budget": (8, 120),
    "max_tool_calls": (1, 8),
}
PER_MESSAGE = 4
"""Tokens of a message: as many as are projected for the shortest one."""

MOST_AGENTS = 12
ALL_OVER, ALL_STILL = 3, 200
"""Milliseconds without an event after which nothing is waited for, and where something is live."""

MOST_ANSWERS = 40
"""Responses after which all agents of a composition are done: some have no cap."""


@tool
async def look(input: str = "") -> str:  # noqa: A002  every tool here takes it
    """Look."""
    await asyncio.sleep(0)
    return "nothing " + input


@dataclass
class Scene:
    """One composition: how it is made, and what was seen of it."""

    chance: random.Random
    agents: list[Agent] = field(default_factory=list)
    number: int = 0
    """Agents that were begun to be made."""
    answers: int = 0
    working: set[object] = field(default_factory=set)
    """Tools that run."""
    quiet: int = 0
    """How often nothing ran when it was looked for, one time after the other."""
    left: list[Any] = field(default_factory=list)
    """Streams that are never read to the end."""
    models: list[Metered] = field(default_factory=list)
    """Those that tools ask by themselves."""
    events: list[Event] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    """Streams after whose events the reader did not have its own context."""

    def fork(self) -> random.Random:
        """Derive a separate random generator for code that may run in another thread."""
        return random.Random(self.chance.random())  # noqa: S311  chance, no secret

    def limits(self, *, often: float, tree: bool) -> Limits:
        """Cap some things, or nothing."""
        if self.chance.random() > often:
            return Limits()
        names = self.chance.sample(list(CAPS), self.chance.choice((1, 1, 2)))
        caps = {name: self.chance.randint(*CAPS[name]) for name in names}
        if not tree and self.chance.random() < 0.2:
            caps["max_iterations"] = self.chance.randint(1, 4)
        return Limits(**caps)  # type: ignore[arg-type]

    def plugins(self) -> list[Any]:
        """Give an agent random limits, a tree and an action."""
        own = self.limits(often=0.4, tree=False)
        tree = self.limits(often=0.4, tree=True)
        if own == tree == Limits():
            return []
        return [LimitsPlugin(own, action=self.chance.choice(ACTIONS), tree=tree)]

    @property
    def calls(self) -> int:
        """Requests that reached the models."""
        models = [*self.models, *(agent.model for agent in self.agents)]
        return sum(model.calls for model in models)  # type: ignore[attr-defined]

    @property
    def waiting(self) -> bool:
        """True while background tools wait for a slot, or to be reported as ended."""
        tasks = [agent.state.get("strands.background_tasks") or () for agent in self.agents]
        return any(each["status"] in ("queued", "working") for some in tasks for each in some)

    @contextmanager
    def work(self) -> Iterator[None]:
        """A tool runs."""
        tool = object()
        self.working.add(tool)
        try:
            yield
        finally:
            self.working.discard(tool)

    # --- agents -----------------------------------------------------------------------------------

    def agent(self, depth: int) -> Agent:
        """Make an agent whose tools may be, or call, other agents."""
        chance, name = self.chance, f"agent{self.number}"
        self.number += 1
        tools = list(self.tools(depth))
        in_background: BackgroundTasksConfig = {
            "always": chance.sample(tools, 1),
            "wait_for_completion": chance.random() < 0.5,
            "max_concurrency": chance.choice((1, 100)),
        }
        agent = Agent(
            model=Metered(self.script([each.tool_name for each in tools]), per_message=PER_MESSAGE),
            tools=tools,
            name=name,
            callback_handler=None,
            plugins=self.plugins(),
            retry_strategy=ModelRetryStrategy(max_attempts=3, initial_delay=0, max_delay=0),
            background_tasks=in_background if chance.random() < 0.15 else None,
            tool_executor=SequentialToolExecutor() if chance.random() < 0.2 else None,
        )
        self.agents.append(agent)
        if chance.random() < 0.2:
            agent.hooks.add_callback(AfterModelCallEvent, self.validator())
        if chance.random() < 0.15:
            resumes = iter(["go on"] * chance.randint(1, 3))
            agent.hooks.add_callback(
                AfterInvocationEvent, lambda event: setattr(event, "resume", next(resumes, None))
            )
        return agent

    def script(self, names: list[str]) -> Iterator[Answer]:
        """Answer at random, forever."""
        chance = self.fork()
        while True:
            self.answers += 1
            dice = chance.random()
            if dice < 0.1:
                yield fails(ModelThrottledException("busy"))
            elif dice < 0.13:
                yield fails(OSError("gone"))
            elif dice < 0.25 or self.answers > MOST_ANSWERS:
                yield says("done")
            else:
                chosen = chance.choices(names, k=chance.choice((1, 2, 4, 6)))
                yield Answer(tools=tuple((each, {"input": "go"}) for each in chosen))

    def validator(self) -> Any:
        """Retry a response now and then."""
        chance = self.fork()

        def validate(event: AfterModelCallEvent, **_: Any) -> None:
            if event.stop_response is not None and chance.random() < 0.3:
                event.retry = self.answers < MOST_ANSWERS
            elif event.stop_response is not None and chance.random() < 0.3:
                event.stop_response.message.pop("metadata", None)

        return validate

    def tools(self, depth: int) -> Iterator[Any]:
        """Give it something that does no more than it says, and something that composes."""
        yield look
        if self.chance.random() < 0.2:
            yield self.asking_a_model()
        if depth and self.number < MOST_AGENTS:
            ways = (
                self.as_tools,
                self.in_parallel,
                self.in_threads,
                self.in_turn,
                self.abandoned,
                self.in_graph,
                self.in_swarm,
            )
            yield from self.chance.choice(ways)(depth - 1)

    def as_tools(self, depth: int) -> Iterator[Any]:
        """Agents that are tools themselves."""
        for _ in range(self.chance.randint(2, 4)):
            child = self.agent(depth)
            yield child.as_tool(name=child.name, description="Ask.")

    def asking_a_model(self) -> Any:
        """A tool that calls a model directly."""
        model = Metered(endless(says("hint")), "helper", PER_MESSAGE)
        self.models.append(model)

        @tool
        async def think(input: str = "") -> str:  # noqa: A002
            """Call a model."""
            messages: Messages = [{"role": "user", "content": [{"text": input}]}]
            with self.work():
                return str([each async for each in model.stream(messages)])

        return think

    def in_parallel(self, depth: int) -> Iterator[Any]:
        """A tool that calls several agents concurrently."""
        children = [self.agent(depth) for _ in range(self.chance.randint(2, 5))]

        @tool
        async def ask_all(input: str) -> str:  # noqa: A002
            """Call all of them concurrently."""
            with self.work():
                return str(
                    await asyncio.gather(*(outcome(each.invoke_async(input)) for each in children))
                )

        yield ask_all

    def in_threads(self, depth: int) -> Iterator[Any]:
        """A tool that calls several agents concurrently, in threads without a context."""
        children = [self.agent(depth) for _ in range(self.chance.randint(2, 4))]
        hands_on = self.chance.random() < 0.5

        @tool
        def ask_in_threads(input: str) -> str:  # noqa: A002
            """Call all of them concurrently."""
            with self.work(), ThreadPoolExecutor(len(children)) as pool:
                asks = [
                    pool.submit(contextvars.copy_context().run, self.asked_now, child, input)
                    if hands_on
                    else pool.submit(self.asked_now, child, input)
                    for child in children
                ]
                return str([each.result() for each in asks])

        yield ask_in_threads

    def in_turn(self, depth: int) -> Iterator[Any]:
        """A tool that calls agents one after another, in a thread that cannot be canceled."""
        children = [self.agent(depth) for _ in range(self.chance.randint(2, 4))]

        @tool
        def ask_in_turn(input: str) -> str:  # noqa: A002
            """Ask one, then the next."""
            with self.work():
                return str([self.asked_now(child, input) for child in children])

        yield ask_in_turn

    def asked_now(self, child: Agent, prompt: str) -> str:
        """Call an agent that may be busy with another question, and wait."""
        try:
            return str(child(prompt).stop_reason)
        except Exception as error:  # noqa: BLE001  whatever it is, the tool answers
            return type(error).__name__

    def abandoned(self, depth: int) -> Iterator[Any]:
        """A tool that reads an agent's stream for a while, asks another one, and may close it."""
        first, second = self.agent(depth), self.agent(0)
        number, is_left = self.chance.randint(1, 30), self.chance.random() < 0.3

        @tool
        async def abandon(input: str) -> str:  # noqa: A002
            """Read a little."""
            stream: Any = first.stream_async(input)
            async with nullcontext() if is_left else aclosing(stream):
                if is_left:
                    self.left.append(stream)
                with self.work(), suppress(Exception):
                    before = context_now()
                    async for _ in first_of(stream, number):
                        if context_now() != before:
                            self.leaks.append(first.name)
                    return await outcome(second.invoke_async(input))
            return "failed"

        yield abandon

    def in_graph(self, depth: int) -> Iterator[Any]:
        """A tool that runs a graph: two entries, and one behind both."""
        nodes = [self.agent(depth if not n else 0) for n in range(3)]
        builder = GraphBuilder()
        for node in nodes:
            builder.add_node(node, node.name)
        builder.set_entry_point(nodes[0].name)
        builder.set_entry_point(nodes[1].name)
        builder.add_edge(nodes[0].name, nodes[2].name)
        builder.set_max_node_executions(5)

        @tool
        async def run_graph(input: str) -> str:  # noqa: A002
            """Run the graph."""
            with self.work():
                return await outcome(builder.build().invoke_async(input))

        yield run_graph

    def in_swarm(self, depth: int) -> Iterator[Any]:
        """A tool that runs a swarm of two."""
        nodes = [self.agent(depth), self.agent(0)]

        @tool
        async def run_swarm(input: str) -> str:  # noqa: A002
            """Run the swarm."""
            with self.work():
                return await outcome(Swarm(nodes, max_iterations=3).invoke_async(input))

        yield run_swarm

    # --- what is done -----------------------------------------------------------------------------

    async def play(self, top: Agent) -> None:
        """Call the outermost agent, and wait for its leftover work."""
        await self.ask(top)
        for stream in self.left:  # in another task than that of who has read it
            with suppress(Exception):
                await stream.aclose()
        # Tools in the background have a loop of Strands' own, which outlives this one. A stream
        # that was cancelled lives as long as the traceback of that, and does nothing any more.
        told = -1
        while self.quiet < (ALL_STILL if len(LIVE) or self.waiting else ALL_OVER):
            await asyncio.sleep(0.001)
            is_busy = self.working or told != len(self.events)
            self.quiet, told = 0 if is_busy else self.quiet + 1, len(self.events)

    async def ask(self, top: Agent) -> None:
        """Call the outermost agent, and answer its interrupts, a few times."""
        prompt: Any = "go"
        for _ in range(3):
            try:
                result = await top.invoke_async(prompt)
            except Exception:  # noqa: BLE001  of a limit, or of a model
                return
            if result.stop_reason != "interrupt":
                return
            answers = ("stop", {"extend": {"max_turns": 2, "max_token_budget": 20}})
            prompt = [
                {
                    "interruptResponse": {
                        "interruptId": each.id,
                        "response": self.chance.choice(answers),
                    }
                }
                for each in result.interrupts or ()
            ]


async def outcome(asked: Awaitable[Any]) -> str:
    """Call an agent that may be busy with another question, or fail."""
    try:
        return type(await asked).__name__
    except Exception as error:  # noqa: BLE001  whatever it is, the tool answers
        return type(error).__name__


def context_now() -> tuple[Any, ...]:
    """Return what the current task works for, and its span and baggage."""
    return CURRENT.get(), TASK_SCOPE.get(), otel_context.get_current()


async def first_of(stream: Any, number: int) -> Any:
    """The first events of a stream."""
    for _ in range(number):
        event = await anext(stream, None)
        if event is None:
            return
        yield event


# --- what has to hold -----------------------------------------------------------------------------


def tallied(books: Books) -> Iterator[str]:
    """Say which trees are not the sums of their members."""
    runs = books.runs.values()
    for tree in {id(tree): tree for run in runs for tree in run.trees}.values():
        below = [run.tally for run in runs if tree in run.trees]
        for name in ("turns", "model_calls", "tokens", "tool_calls"):
            parts, whole = sum(getattr(each, name) for each in below), getattr(tree.tally, name)
            if parts != whole:
                yield f"{name} of a tree are {whole}, and {parts} of its members"


def problems_of(scene: Scene, books: Books) -> Iterator[str]:
    """Say what does not hold."""
    runs = list(books.runs.values())
    yield from books.problems
    trees = {id(tree): tree for run in runs for tree in run.trees}.values()
    largest = max((f.usage.total for f in scene.events if isinstance(f, ModelCall)), default=0)
    for budget in (*(run.budget for run in runs), *trees):
        if budget.policy.action != "observe":
            larger = largest + books.used[id(budget)]["estimated"]
            yield from over(budget, larger, books.late[id(budget)])
        held = budget.reserved
        if (held.turns, held.model_calls, held.tokens, held.cost) != (0, 0, 0, 0):
            yield f"never released: {held}"
    yield from tallied(books)
    for run in runs:
        # The outermost agent was made last.
        if run.parent is None and run.invocation.agent != scene.agents[-1].name:
            yield f"{run.invocation.agent} belongs to no tree of the outermost agent"
    for fact in scene.events:
        if isinstance(fact, Halt) and fact.breaches and not reached(fact.breaches[0]):
            yield f"halted below its cap: {fact.breaches[0]}"
    yield from (f"the reader of {name} has a context of its agent" for name in scene.leaks)
    yield from halted_without_limit(scene, books)
    yield from invalid_histories(scene)
    told, made = sum(run.tally.model_calls for run in runs), scene.calls
    if told != made:
        yield f"{made} calls were made, and {told} were published"


def halted_without_limit(scene: Scene, books: Books) -> Iterator[str]:
    """Say which halts no limit explains."""
    limited = {run.invocation.id for run in books.runs.values() if run.is_limited}
    for fact in scene.events:
        if isinstance(fact, Halt) and fact.invocation.id not in limited:
            yield f"halted without a limit: {fact.sentence}"


def reached(breach: Breach) -> bool:
    """Return whether a limit was reached by usage plus reservations."""
    return breach.observed >= breach.cap and 0 <= breach.reserved <= breach.observed


def over(budget: Budget, largest: int, late: int) -> Iterator[str]:
    """Say which caps were passed by more than one last answer, and tokens by more than a call.

    Args:
        budget: What is capped.
        largest: Tokens of the largest call.
        late: Side calls that came too late to be held by it.
    """
    caps, used = dict(budget.policy.limits.items()), budget.tally
    last = int(budget.wrapped_up and budget.policy.action == "wrap_up")
    for name, most in (
        ("model_calls", caps.get("max_model_calls", 10**9) + late),
        ("turns", caps.get("max_turns", 10**9) + last),
        ("tool_calls", caps.get("max_tool_calls", 10**9)),
        ("tokens", caps.get("max_token_budget", 10**9) - 1 + largest * (1 + last + late)),
    ):
        if getattr(used, name) > most:
            yield f"{budget.prefix}{name} are {getattr(used, name)}, of {caps} and {last} more"


def invalid_histories(scene: Scene) -> Iterator[str]:
    """Say which agents were halted with a tool use that has no result."""
    ends = {fact.agent: fact for fact in scene.events if isinstance(fact, Stop)}
    for agent in scene.agents:
        end = ends.get(agent.name)
        is_halted = end is not None and end.action in CUT_SHORT
        if is_halted and not is_valid(agent.messages):
            yield f"history of {agent.name}: {agent.messages[-3:]}"


def is_valid(messages: Any) -> bool:
    """Every tool use has its result in the message after it."""
    pending: list[str] = []
    for message in messages:
        results = [b["toolResult"]["toolUseId"] for b in message["content"] if "toolResult" in b]
        if sorted(results) != sorted(pending):
            return False
        pending = [b["toolUse"]["toolUseId"] for b in message["content"] if "toolUse" in b]
    return not pending


def problems(seed: int) -> list[str]:
    """Make one composition, let it run, and say what does not hold of it."""
    scene, books = Scene(random.Random(seed)), Books()  # noqa: S311  chance, no secret
    with books.kept(), patch.object(asyncio, "wait_for", wait_for):
        otel_limits.enable(
            scene.limits(often=0.5, tree=False),
            tree=scene.limits(often=0.8, tree=True),
            action=scene.chance.choice(ACTIONS),
            observers=[scene.events.append, books],
        )
        try:
            asyncio.run(scene.play(scene.agent(2)))
        finally:
            otel_limits.disable()
    return [f"seed {seed}: {each}" for each in problems_of(scene, books)]


async def wait_for(waited: Any, timeout: float) -> Any:
    """Wait like `asyncio.wait_for` since Python 3.12.

    Before that it may swallow a cancellation (python/cpython#86296), and a graph that is cancelled
    within a graph then waits forever. Strands polls by it, which need not take 0.1 s.
    """
    task = asyncio.ensure_future(waited)
    try:
        await asyncio.wait({task}, timeout=min(timeout, 0.003))
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not task.done():
        task.cancel()
        raise asyncio.TimeoutError
    return task.result()


def main() -> None:
    """Try as many as the first argument says, from the seed that the second one says."""
    number, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    found = 0
    for seed in range(first, first + number):
        for problem in problems(seed):
            found += 1
            print(problem)  # noqa: T201
    print(f"{number} compositions, {found} problems")  # noqa: T201


if __name__ == "__main__":
    main()
