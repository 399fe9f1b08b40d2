"""A limit is one entry of one table; what else it needs is said here by name."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import otel_limits
from otel_limits import LimitReachedError, Limits
from otel_limits.cli import main
from otel_limits.core.errors import limit_reached
from otel_limits.core.halt_texts import WHY
from otel_limits.core.limits import LIMITS, STOP_REASONS, Breach, Caps, Limit
from otel_limits.core.policy import Verdict
from otel_limits.settings.table import SETTINGS
from tests.paths import ROOT
from tests.policy_schema import PATH
from tests.unit.agents.test_every_limit import CASES

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGES = "".join(
    page.read_text(encoding="utf-8")
    for page in (
        ROOT / "README.md",
        *(Path(otel_limits.__file__).parent / "docs").glob("*.md"),
    )
)
# As text, because importing it needs Python 3.11.
COLOURS = re.findall(r'r?"(.+)": "#', (ROOT / "dashboards/panels.py").read_text(encoding="utf-8"))
SCHEMA = json.loads(PATH.read_text(encoding="utf-8"))["$defs"]

NOT_REPLAYED = {
    "max_tool_calls": "replay looks at model calls, not at tools",
    "max_calls_per_tool": "the same",
    "max_duration_seconds": "replay has no clock",
    "max_consecutive_same_tool": "a ledger has no arguments and results to compare",
    "max_identical_tool_calls": "the same",
    "max_repeated_tool_cycles": "the same",
    "max_no_progress_turns": "the same",
    "max_consecutive_tool_failures": "the same",
    "max_consecutive_failures_per_tool": "the same",
    "max_consecutive_handoffs": "the same",
    "max_repeated_failures": "a ledger has no inputs to compare",
}
"""Limits that `audit backtest` cannot try, and why."""


OF_SEVERAL_INVOCATIONS = {"max_consecutive_handoffs", "max_repeated_failures"}
"""Limits that one invocation cannot reach: `tests/features/behaviours.py` tries them."""


def forgotten(limit: Limit, backtest_help: str) -> Iterator[str]:
    """Name each place where a limit is missing."""
    variable = f"OTEL_LIMITS_{limit.name.upper()}"
    fields = {field.name for field in dataclasses.fields(Limits)} & set(Caps.__annotations__)
    if limit.name not in fields:
        yield f"core/limits.py: Limits or Caps has no field {limit.name}"
    if limit.reason not in exported_reasons():
        yield f"__init__.py: no *_STOP_REASON is {limit.reason!r}"
    if limit.reason not in WHY:
        yield f"core/halt_texts.py: WHY has no cause for {limit.reason!r}"
    breach = Breach(limit.name, 1, 1, limit.reason, limit.unit)
    stop = otel_limits.Stop(reason=limit.reason, action="raised", breach=breach)
    error = type(limit_reached(Verdict(limit.reason, (breach,)), stop))
    if error is LimitReachedError:
        yield f"core/errors.py: {limit.reason!r} has no exception class"
    elif error.__name__ not in otel_limits.__all__:
        yield f"__init__.py: {error.__name__} is not exported"
    if f"`{variable}`" not in PAGES or f"`{limit.name}`" not in PAGES:
        yield f"README or docs: {limit.name} is in no table (run python -m tests.generate tables)"
    for section in ("limits", "tree") if limit.in_tree else ("limits",):
        if limit.name not in SCHEMA[section.title()]["properties"]:
            yield (
                f"{PATH.name}: {section} has no {limit.name} (run python -m tests.generate schema)"
            )
    yield from forgotten_outside_package(limit)
    flag = "--" + limit.name.replace("_", "-")
    if flag + " " not in backtest_help and limit.name not in NOT_REPLAYED:
        yield f"audit/backtest.py: {flag} cannot be tried; say why in NOT_REPLAYED if so"


def forgotten_outside_package(limit: Limit) -> Iterator[str]:
    """Name each place next to the package where a limit is missing."""
    if limit.name not in CASES.keys() | OF_SEVERAL_INVOCATIONS:
        yield f"tests/unit/agents/test_every_limit.py: there is no case for {limit.name}"
    if not any(re.fullmatch(each, limit.reason) for each in COLOURS):
        yield (
            f"dashboards/panels.py: {limit.reason!r} has no colour (then run "
            "python -m tests.generate dashboards)"
        )


def exported_reasons() -> set[str]:
    """Every stop reason that is a public constant."""
    names = (name for name in otel_limits.__all__ if name.endswith("_STOP_REASON"))
    return {getattr(otel_limits, name) for name in names}


@pytest.fixture
def backtest_help(capsys: pytest.CaptureFixture[str]) -> str:
    """The options of `audit backtest`."""
    with pytest.raises(SystemExit):
        main(["audit", "backtest", "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("limit", LIMITS.values(), ids=attrgetter("name"))
def test_a_limit_is_everywhere(limit: Limit, backtest_help: str) -> None:
    """A new one that is only in the table fails here, with the names of the other places."""
    missing = "\n".join(forgotten(limit, backtest_help))
    assert not missing, missing


def test_omissions_of_a_new_limit_are_named(backtest_help: str) -> None:
    """All omissions, in one run."""
    new = Limit(
        name="max_dreams", reason="max_dreams", unit="dreams", help="", observed=attrgetter("turns")
    )
    assert [where.partition(":")[0] for where in forgotten(new, backtest_help)] == [
        "core/limits.py",
        "__init__.py",
        "core/halt_texts.py",
        "core/errors.py",
        "README or docs",
        "policy.schema.json",
        "policy.schema.json",
        "tests/unit/agents/test_every_limit.py",
        "dashboards/panels.py",
        "audit/backtest.py",
    ]


def test_limits_are_the_table() -> None:
    """Nothing is a field of `Limits`, or a case, that is not in the table."""
    fields = [field.name for field in dataclasses.fields(Limits) if field.init]
    assert fields == list(LIMITS)
    assert CASES.keys() == LIMITS.keys() - OF_SEVERAL_INVOCATIONS
    assert set(LIMITS) >= NOT_REPLAYED.keys()


def test_the_settings_follow() -> None:
    """Each limit is a variable and an option, and those that a tree can have twice."""
    settings = {setting.name: setting for setting in SETTINGS}
    for limit in LIMITS.values():
        assert settings[limit.name].kind is limit.kind
        assert (f"tree_{limit.name}" in settings) is limit.in_tree


def test_every_reason_is_a_public_constant() -> None:
    """Also those that no limit leads to."""
    assert set(STOP_REASONS) == exported_reasons()


@pytest.mark.parametrize("limits", [Limits(), *(case.limits for case in CASES.values())])
def test_limits_can_be_copied(limits: Limits) -> None:
    """By any means, with what follows from them."""
    copies: list[Any] = [copy.copy(limits), copy.deepcopy(limits)]
    copies.append(pickle.loads(pickle.dumps(limits)))  # noqa: S301  our own bytes
    for each in copies:
        assert (each, each.active) == (limits, limits.active)
