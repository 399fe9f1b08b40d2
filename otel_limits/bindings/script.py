"""Scripts of models, to test what limits do to an agent without a provider."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.limits import Limits
from otel_limits.core.secrets import quote_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


SUMS: Final = ("inputTokens", "outputTokens", "totalTokens")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One scripted response of a model."""

    text: str = ""
    tools: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """Names and arguments of the requested tools."""
    usage: Mapping[str, int] | None = field(
        default_factory=lambda: {"inputTokens": 10, "outputTokens": 5, "totalTokens": 15}
    )
    """Usage that the provider reports, with Strands' names; `None` if it reports nothing."""
    stop_reason: str | None = None
    error: BaseException | None = None
    """Raised after the chunks, or immediately if there are none."""


FIELDS: Final = frozenset(each.name for each in fields(Answer))


class Script:
    """The answers of a scripted model, in order.

    Args:
        answers: They may be endless.
    """

    def __init__(self, answers: Iterable[Answer]) -> None:
        """Start before the first."""
        self._answers = iter(answers)
        self._requests = 0

    def __iter__(self) -> Script:
        """Return itself, as every iterator does."""
        return self

    def __next__(self) -> Answer:
        """Return the next answer.

        Raises:
            RuntimeError: There is none. Not StopIteration, which would end a generator of the
                framework, and be replaced there.
        """
        self._requests += 1
        try:
            return next(self._answers)
        except StopIteration:
            raise RuntimeError(
                f"The script has no answer for request {self._requests}. Add one, or use endless()."
            ) from None


CACHED: Final = ("cacheReadInputTokens", "cacheWriteInputTokens")
"""Input read from a cache and written to it, as Strands names them."""


def details_in(answer: Answer, cached: Sequence[str] = CACHED) -> dict[str, int]:
    """Return other counts of the usage than input, output and total.

    Args:
        answer: The answer.
        cached: The framework's names of cached input.
    """
    names = dict(zip(CACHED, cached, strict=True))
    usage = answer.usage or {}
    return {names.get(name, name): usage[name] for name in usage if name not in SUMS}


def says(text: str, **changes: Any) -> Answer:
    """Script a response in text."""
    return Answer(text=text, **changes)


def uses(*names: str, arguments: Mapping[str, Any] | None = None, **changes: Any) -> Answer:
    """Script a response that requests tools.

    Args:
        names: Names of the tools.
        arguments: Arguments of each of the calls.
        changes: Other fields of the answer, such as `usage`.

    Raises:
        TypeError: An argument is unknown, e.g. one of the tool.
    """
    if unknown := changes.keys() - FIELDS:
        first = min(unknown)
        given = f"{{{first!r}: {quote_value(changes[first])}}}"
        raise TypeError(
            f"uses() got an unexpected keyword argument {first!r}. Give the arguments of a tool as "
            f"arguments={given}."
        )
    return Answer(tools=tuple((name, arguments or {}) for name in names), **changes)


def fails(error: BaseException) -> Answer:
    """Script a request that fails before any response."""
    return Answer(error=error, usage=None)


def endless(answer: Answer) -> Iterator[Answer]:
    """Script the same response forever."""
    return itertools.repeat(answer)


def only(name: str, cap: Any) -> Limits:
    """Set the one limit `name`."""
    return Limits(**{name: cap})


def tokens(total: int) -> dict[str, int]:
    """Make reported usage of `total` tokens, one of them output; of none if it is 0."""
    output = min(1, total)
    return {"inputTokens": total - output, "outputTokens": output, "totalTokens": total}


@dataclass(frozen=True, kw_only=True)
class ScriptedRun:
    """One call of an agent whose model answers from a script."""

    agent: str
    """Its name."""
    script: Iterable[Answer]
    tools: Mapping[str, Callable[[], str]]
    """Its tools, by name. Their arguments are ignored."""
    model: str = "scripted"
    """The ID of its model."""


MOST_TURNS: Final = 10_000
"""A limit of the framework on its turns, which no script reaches."""


def runaway(searches: int, observe: Callable[[], None]) -> ScriptedRun:
    """Make an agent search again and again, with a longer prompt each time.

    Args:
        searches: After these, it answers.
        observe: Called by the tool.
    """
    prompts = [tokens(150 + 75 * number) for number in range(1, searches + 2)]
    asks = [uses("search", usage=prompt) for prompt in prompts[:-1]]

    def search() -> str:
        observe()
        return "nothing found"

    script = [*asks, says("not halted", usage=prompts[-1])]
    return ScriptedRun(agent="runaway", script=script, tools={"search": search})
