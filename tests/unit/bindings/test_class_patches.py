"""Methods of a framework are wrapped once, also if other instrumentations wrap them in turn."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import wrapt
from langgraph.pregel import Pregel

from otel_limits import Event, Started, Stop, disable, enable
from tests.langchain import graphs

if TYPE_CHECKING:
    from collections.abc import Callable


def with_name(method: Any) -> Any:
    """A wrapper as most instrumentations make it."""

    @functools.wraps(method)
    def stream(*args: Any, **options: Any) -> Any:
        return method(*args, **options)

    return stream


def without_name(method: Any) -> Any:
    """A wrapper that does not show what it wraps."""

    def stream(*args: Any, **options: Any) -> Any:
        return method(*args, **options)

    return stream


@wrapt.decorator
def by_wrapt(method: Any, _: Any, args: Any, options: Any) -> Any:
    """A wrapper as those of OpenTelemetry."""
    return method(*args, **options)


def twice(method: Any) -> Any:
    """Two wrappers."""
    return without_name(with_name(method))


WRAPPERS = {each.__name__: each for each in (with_name, without_name, twice)}


@pytest.fixture
def method(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The method of LangGraph, which is restored afterwards."""
    original = vars(Pregel)["stream"]
    monkeypatch.setattr(Pregel, "stream", original)
    return original


def ends(events: list[Event]) -> list[str]:
    """Run a graph to a limit, and return the begins and ends of its invocations."""
    enable(max_turns=2, observers=[events.append])
    model = graphs.looping()
    graphs.agent(model).invoke(graphs.ASK, graphs.STEPS)
    assert model.calls == 2
    disable()
    return [type(each).__name__ for each in events if isinstance(each, (Started, Stop))]


@pytest.mark.parametrize("wrap", [*WRAPPERS.values(), by_wrapt], ids=[*WRAPPERS, "wrapt"])
def test_method_that_others_have_wrapped_is_followed_once(
    wrap: Callable[[Any], Any], method: Any, events: list[Event]
) -> None:
    """Theirs keeps calling ours, which works again as soon as otel-limits is enabled again."""
    enable(max_turns=2)
    assert vars(Pregel)["stream"] is not method
    Pregel.stream = wrap(vars(Pregel)["stream"])  # type: ignore[method-assign]
    for _ in range(3):
        disable()
        assert ends(events) == ["Started", "Stop"]
        events.clear()


def test_method_that_others_have_unwrapped_is_restored(method: Any, events: list[Event]) -> None:
    """Afterwards, only ours was left."""
    enable(max_turns=2)
    ours = vars(Pregel)["stream"]
    Pregel.stream = with_name(ours)  # type: ignore[method-assign]
    disable()
    Pregel.stream = ours  # type: ignore[method-assign]
    assert ends(events) == ["Started", "Stop"]
    assert vars(Pregel)["stream"] is method


def test_method_that_others_have_replaced_is_followed(method: Any, events: list[Event]) -> None:
    """An instrumentation that ends restores what it found, which is not ours."""
    enable(max_turns=2)
    Pregel.stream = method  # type: ignore[method-assign]
    disable()
    assert ends(events) == ["Started", "Stop"]
