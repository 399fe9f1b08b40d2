"""Random programs: the same seed makes the same program for every framework."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final, get_args

from otel_limits import Limits
from tests.compositions.program import SEQUENTIAL, WAYS, Agent, Call, Program, Reply, Tool, Way

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_limits.core.policy import Action
    from tests.compositions.run import Framework

ACTIONS: Final[tuple[Action, ...]] = ("halt", "halt", "wrap_up", "raise", "observe")
CAPS: Final = {
    "max_turns": (1, 8),
    "max_model_calls": (1, 10),
    "max_token_budget": (8, 120),
    "max_tool_calls": (1, 8),
}
AGENTS: Final[dict[Way, tuple[int, int]]] = {
    "look": (0, 0),
    "be": (1, 1),
    "abandon": (2, 2),
    "graph": (3, 3),
    "swarm": (2, 2),
    "branches": (2, 4),
    "handoff": (1, 1),
    "cancel": (2, 2),
}
"""How many agents tools of some ways have; others have 2 to 4."""
MOST_AGENTS: Final = 12


def sequential(seed: int) -> Program:
    """Make a program whose agents run one at a time, so that all its counts are certain."""
    return Chance(seed, SEQUENTIAL).program(is_concurrent=False)


def concurrent(seed: int) -> Program:
    """Make a program whose agents run concurrently."""
    return Chance(seed, WAYS).program(is_concurrent=True)


def own(seed: int, framework: Framework) -> Program:
    """Make a concurrent program that only one framework can run."""
    ways, actions = (*WAYS, *framework.own_ways), (*ACTIONS, "ask")
    return Chance(seed, ways, framework.own_traits, actions).program(is_concurrent=True)


class Chance:
    """Makes one program.

    Args:
        seed: The seed.
        ways: What tools may do.
        traits: Settings that agents may have.
        actions: The actions at a limit.
    """

    def __init__(
        self,
        seed: int,
        ways: Sequence[Way],
        traits: Sequence[str] = (),
        actions: Sequence[Action] = ACTIONS,
    ) -> None:
        self._chance = random.Random(seed)  # noqa: S311  chance, no secret
        self._ways = [way for way in ways if way != "look"]
        self._traits = traits
        self._actions = actions
        self._agents: list[Agent] = []
        self._begun = 0

    def program(self, *, is_concurrent: bool) -> Program:
        """Make agents that call agents, and limit them."""
        chance = self._chance
        self._agent(2, is_concurrent=is_concurrent)
        return Program(
            agents=tuple(reversed(self._agents)),  # the outermost was made last
            limits=self._limits(often=0.5, tree=False),
            tree=self._limits(often=0.8, tree=True),
            action=chance.choice(self._actions),
            calls=tuple(chance.choices(get_args(Call), k=chance.choice((1, 1, 2)))),
            is_concurrent=is_concurrent,
        )

    def _limits(self, *, often: float, tree: bool) -> Limits:
        """Cap some things, or nothing."""
        chance = self._chance
        if chance.random() > often:
            return Limits()
        names = chance.sample(list(CAPS), chance.choice((1, 1, 2)))
        caps: dict[str, Any] = {name: chance.randint(*CAPS[name]) for name in names}
        if not tree and chance.random() < 0.2:
            caps["max_iterations"] = chance.randint(1, 4)
        return Limits(**caps)

    def _agent(self, depth: int, *, is_concurrent: bool) -> str:
        chance, name = self._chance, f"agent{self._begun}"
        self._begun += 1
        tools = [Tool(name=f"look{name}")]
        if chance.random() < 0.2:
            tools.append(self._thinking(f"think{name}"))
        if depth and self._begun < MOST_AGENTS:
            way = chance.choice(self._ways)
            copies = chance.randint(2, 4) if way == "be" else 1
            tools += [
                self._tool(way, depth - 1, f"{way}{number}{name}", is_concurrent=is_concurrent)
                for number in range(copies)
            ]
        has_own = chance.random() < 0.4
        self._agents.append(
            Agent(
                name=name,
                replies=self._replies([each.name for each in tools], is_concurrent=is_concurrent),
                tools=tuple(tools),
                limits=self._limits(often=0.7, tree=False) if has_own else Limits(),
                tree=self._limits(often=0.7, tree=True) if has_own else Limits(),
                action=chance.choice(self._actions) if has_own else None,
                traits=frozenset(each for each in self._traits if chance.random() < 0.2),
            )
        )
        return name

    def _thinking(self, name: str) -> Tool:
        """Make a tool that calls a model."""
        model = f"model{self._begun}"
        self._begun += 1
        self._agents.append(Agent(name=model, is_model=True))
        return Tool(name=name, way="be", agents=(model,))

    def _tool(self, way: Way, depth: int, name: str, *, is_concurrent: bool) -> Tool:
        chance = self._chance
        number = chance.randint(*AGENTS.get(way, (2, 4)))
        agents = [
            # Of a graph, only the first may be deep, or there would be too many.
            self._agent(depth if not n or way not in AGENTS else 0, is_concurrent=is_concurrent)
            for n in range(number)
        ]
        return Tool(
            name=name,
            way=way,
            agents=tuple(agents),
            events=chance.randint(1, 30),
            is_closed=chance.random() < 0.7,
        )

    def _replies(self, tools: Sequence[str], *, is_concurrent: bool) -> tuple[Reply, ...]:
        return tuple(
            self._reply(tools, is_concurrent=is_concurrent)
            for _ in range(self._chance.randint(1, 9))
        )

    def _reply(self, tools: Sequence[str], *, is_concurrent: bool) -> Reply:
        chance, dice = self._chance, self._chance.random()
        # Where calls run concurrently, each has as many tokens as are reserved for it at least.
        tokens = 4 if is_concurrent else chance.randint(2, 20)
        if dice < 0.1:
            return Reply(failure="busy")
        if dice < 0.13:
            return Reply(failure="lost")
        if dice < 0.25:
            return Reply(tokens=tokens)
        chosen = chance.choices(tools, k=chance.choice((1, 2, 4, 6)))
        if not is_concurrent:  # Strands calls an agent only once for one response
            chosen = [each for n, each in enumerate(chosen) if n == 0 or each not in chosen[:n]]
        return Reply(tools=tuple(chosen), tokens=tokens)
