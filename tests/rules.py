"""Rules over many cases: one test of a rule names every case that breaks it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pytest

Rule = TypeVar("Rule", bound=Callable[..., None])


def over(cases: Mapping[str, Any], *arguments: str) -> Callable[[Rule], Rule]:
    """Make a test of a rule.

    Args:
        cases: What the rule is about, by the name that a failure shows.
        arguments: The arguments of the rule that a case gives: its parts, or itself for only one.
    """

    def decorate(rule: Rule) -> Rule:
        @functools.wraps(rule)
        def test(**fixtures: Any) -> None:
            broken = {}
            for name, case in cases.items():
                values = (case,) if len(arguments) == 1 else case
                try:
                    rule(**fixtures, **dict(zip(arguments, values, strict=True)))
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  all are listed
                    broken[name] = f"{type(error).__name__}: {error}"
            assert cases, "A rule about nothing holds always."
            assert not broken, "\n".join(f"{name}: {why}" for name, why in broken.items())

        signature = inspect.signature(rule)
        fixtures = [each for name, each in signature.parameters.items() if name not in arguments]
        test.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return test  # type: ignore[return-value]

    return decorate
