"""Throws a fault in each internal call of otel-limits in turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import otel_limits
from otel_limits.runs.registry import LIVE
from otel_limits.testing import says, uses

if TYPE_CHECKING:
    from types import FrameType

    Profile = Callable[[FrameType, str, Any], None]

PACKAGE: Final = str(Path(otel_limits.__file__).parent)

SECOND: Final = {"halt": uses("search"), "wrap_up": says("in part")}
"""The second answer of a scripted model, by the action at a limit of one turn."""

NOT_THROWN_IN: Final = (
    *("scripted_model.py", "scripted_chat_model.py", "scripted_agents_model.py"),
    *("followed_runs.py", "admission.py", "script.py"),
)
"""Scripted models, and the waits that every event goes through on its way."""

ENTRANCES: Final = {
    *("guarded", "decorate", "suppress_errors", "next_of", "_prepare", "prepare", "_opened"),
    *("read_answer", "read_part"),
    *("admit", "settle", "wait", "send", "streamed", "finish", "forget", "_finish_run"),
    *("__enter__", "__exit__"),
}
"""Functions on the way in and out of each framework, which do nothing that can fail but call what
they guard."""


class InternalCalls:
    """The calls in which faults are thrown.

    Args:
        entrances: Functions like `ENTRANCES` of one framework, in one text.
    """

    def __init__(self, entrances: str) -> None:
        self._entrances = {*ENTRANCES, *entrances.split()}

    def count(self, run: Callable[[Profile], object]) -> Counter[str]:
        """Return how often a run calls each function, if nothing has run before it."""
        LIVE.after_fork()
        called: Counter[str] = Counter()

        def note(frame: FrameType, event: str, _: Any) -> None:
            if event == "call" and self._is_ours(frame):
                called[name_of(frame)] += 1

        run(note)
        assert len(called) > 50
        return called

    def throw_in(self, name: str, number: int, error: type[Exception]) -> Fault:
        """Make a profile function that throws when a function is called that often.

        It forgets earlier runs: after a failure, for example, a run calls more functions.
        """
        LIVE.after_fork()
        return Fault(self._is_ours, name, number, error)

    def _is_ours(self, frame: FrameType) -> bool:
        code = frame.f_code
        return (
            code.co_filename.startswith(PACKAGE)
            and not code.co_filename.endswith(NOT_THROWN_IN)
            and code.co_name not in self._entrances
            and not code.co_name.startswith("<")
        )


class Fault:
    """A profile function that throws, once.

    Args:
        is_ours: Whether a call is one in which faults are thrown.
        name: The function.
        number: At which of its calls.
        error: The class of the error.
    """

    def __init__(
        self, is_ours: Callable[[FrameType], bool], name: str, number: int, error: type[Exception]
    ) -> None:
        self._is_ours, self._name, self._error = is_ours, name, error
        self._left = number

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Count a call, and throw in the last one."""
        if event == "call" and self._is_ours(frame) and name_of(frame) == self._name:
            self._left -= 1
            if self._left == 0:
                raise self._error(f"thrown in {self._name}")

    @property
    def is_thrown(self) -> bool:
        """True once it was thrown."""
        return self._left <= 0


def name_of(frame: FrameType) -> str:
    """Name the function of a frame."""
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"
