"""Events are immutable for every observer."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import REGISTRY

import otel_limits
from otel_limits import (
    Event,
    Invocation,
    Limits,
    ModelCall,
    Observer,
    Started,
    Stop,
    Usage,
    disable,
    enable,
)
from otel_limits.testing import ScriptedModel, endless, uses
from tests.ledger.fixtures import LedgerFile

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeAgent

LIMITS = Limits(max_turns=2, max_calls_per_tool={"search": 5}, max_cost_usd=Decimal(1))
INVOCATION = Invocation(agent="research", id="i1", root_id="i1")
STARTED = Started(
    invocation=INVOCATION, limits=LIMITS, action="halted", unsampled=True, attributes={"user": "u1"}
)
CALL = ModelCall(
    invocation=INVOCATION,
    number=1,
    model="m1",
    kind="measured",
    usage=Usage(input=90, output=30),
    estimated=False,
    span_id=None,
    seconds=1.5,
)
STOP = Stop(reason="end_turn", action="none", breach=None)


def test_each_public_name_is_completed() -> None:
    """Also those that are imported on first use."""
    assert set(otel_limits.__all__) <= set(dir(otel_limits))


POLICY = """
models:
  "scripted*": {price: {input: 100, output: 200}}
"""


def parts(value: object) -> Iterator[object]:
    """Yield a value and all that is in it, as deep as it goes."""
    yield value
    if dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            yield from parts(getattr(value, each.name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from parts(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from parts(item)


def changes(value: object) -> Iterator[str]:
    """Try to change a value in every way that Python has; say which ones went through."""
    if dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            try:
                setattr(value, each.name, 0)
            except dataclasses.FrozenInstanceError:
                continue
            yield f"{type(value).__name__}.{each.name}"
    elif isinstance(value, (dict, list, set)):
        for name in ("__setitem__", "clear", "pop", "append", "add", "update"):
            try:
                getattr(value, name, _no_such_way)("tester", 0)
            except TypeError:
                continue
            yield f"{type(value).__name__}.{name}"


def _no_such_way(*_: object) -> None:
    raise TypeError


class Meddler:
    """An application's observer that tries to change every event."""

    def __init__(self) -> None:
        self.told: set[str] = set()
        self.changed: set[str] = set()

    def __call__(self, event: Event) -> None:
        """Try every part of an event."""
        for part in parts(event):
            if dataclasses.is_dataclass(part):
                self.told.add(type(part).__name__)
            self.changed.update(changes(part))


def ignore(event: Event) -> None:
    """Ignore the event."""


def counted() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every otel-limits sample, except timestamps and durations."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in REGISTRY.collect()
        if family.name.startswith("otel_limits") and "seconds" not in family.name
        for sample in family.samples
    }


def published(ledger: LedgerFile) -> list[dict[str, Any]]:
    """Every row of the ledger without what differs from one run to the next."""
    varies = ("id", "_us", "day", "hour", "conversation")
    return [
        {name: value for name, value in row.items() if not name.endswith(varies)}
        for rows in (ledger.invocations(), ledger.calls(), ledger.tools())
        for row in rows
    ]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Soft thresholds, audited attributes and prices: every kind of event has all of its parts."""
    path = tmp_path / "limits.yaml"
    path.write_text(POLICY, encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))
    monkeypatch.setenv("OTEL_LIMITS_WARN_AT", "0.5")
    monkeypatch.setenv("OTEL_LIMITS_AUDIT_KEYS", "user")


def test_observer_cannot_change_events_of_others(
    monkeypatch: pytest.MonkeyPatch,
    make_agent: MakeAgent,
    environment: None,
    source: str,
    tmp_path: Path,
) -> None:
    """Ledger and metrics are the same with an observer that writes to every field it finds."""
    meddler = Meddler()
    observers: list[Observer] = [ignore, meddler]
    results = []
    for number, observer in enumerate(observers):
        ledger = LedgerFile(tmp_path / f"{number}.db")
        monkeypatch.setenv("OTEL_LIMITS_LEDGER", str(ledger.path))
        enable(LIMITS, observers=[observer])
        agent = make_agent(ScriptedModel(endless(uses("search"))), trace_attributes={"user": "u1"})
        assert agent("go").stop_reason == "max_turns"
        results.append((published(ledger), list(ledger.attributes().values()), counted()))
        disable()

    assert meddler.changed == set()
    assert meddler.told >= {"Started", "Limits", "LimitWarning", "Level", "Halt", "Breach", "Stop"}
    assert meddler.told >= {"Cycle", "Turn", "ModelCall", "Usage", "ToolCall", "Invocation"}
    assert results[0] == results[1]
    assert results[0][1] == ["u1"]


@pytest.mark.parametrize("mapping", [STARTED.attributes, LIMITS.max_calls_per_tool])
def test_mapping_in_event_cannot_be_changed(mapping: Any) -> None:
    """Neither item by item nor as a whole; it can be read, compared and written as JSON."""
    before = dict(mapping)
    with pytest.raises(TypeError, match="are immutable"):
        mapping["x"] = 1
    with pytest.raises(TypeError, match="are immutable"):
        mapping |= {"x": 1}
    assert mapping == before == json.loads(json.dumps(mapping))


def test_event_keeps_its_own_attributes() -> None:
    """Later changes to the source dictionary do not affect it."""
    given = {"user": "u1"}
    started = dataclasses.replace(STARTED, attributes=given)
    given["user"] = "another"
    assert started.attributes == {"user": "u1"}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("event", [STARTED, CALL, STOP], ids=lambda event: type(event).__name__)
def test_event_can_be_copied(event: Event, protocol: int) -> None:
    """It can be handed to another process, and is the same there."""
    pickled = pickle.loads(pickle.dumps(event, protocol))  # noqa: S301  our own bytes
    assert pickled == event == copy.deepcopy(event)
    assert hash(pickled) == hash(event)


def test_stop_equality_ignores_its_place_in_the_tree() -> None:
    """A stop that is read from a conversation equals the published one."""
    placed = dataclasses.replace(STOP, invocation=INVOCATION)
    assert (placed, hash(placed)) == (STOP, hash(STOP))
    assert dataclasses.replace(STOP, turns=1) != STOP
