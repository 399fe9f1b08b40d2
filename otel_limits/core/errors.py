"""Everything that otel-limits raises on purpose.

Exception
├── ConfigurationError (a ValueError)
├── LedgerError
│   ├── LedgerMovedError
│   └── NewerLedgerError
└── LimitReachedError
    ├── MaxIterationsReachedException
    ├── MaxTurnsReachedException
    ├── MaxModelCallsReachedError
    ├── MaxTokenBudgetReachedException
    ├── MaxInputTokensReachedError
    ├── MaxOutputTokensReachedError
    ├── MaxToolCallsReachedError
    ├── MaxCostReachedError
    ├── MaxDurationReachedError
    ├── LoopDetectedError
    ├── QuotaExceededError
    ├── QuotaUnavailableError
    └── KilledError
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

from otel_limits.core.halt_texts import for_operator
from otel_limits.core.labels import quoted
from otel_limits.core.wording import shortest

if TYPE_CHECKING:
    from otel_limits.core.events import Stop
    from otel_limits.core.policy import Verdict
    from otel_limits.core.usage import Number


class ConfigurationError(ValueError):
    """Invalid settings.

    Attributes:
        mistakes: One sentence per mistake.
    """

    def __init__(self, mistakes: Sequence[str]) -> None:
        """Keep the sentences separate, so that they can be printed one by one."""
        # The list itself is the argument, because exceptions are pickled and copied by their
        # arguments.
        super().__init__(mistakes)
        self.mistakes = tuple(mistakes)

    def __str__(self) -> str:
        """Return all sentences, one per line."""
        return "\n".join(self.mistakes)


class LedgerError(Exception):
    """The ledger cannot be queried; the message has the reason and the fix."""


class LedgerMovedError(LedgerError):
    """The ledger changed during a query without write access: try again."""


class NewerLedgerError(LedgerError):
    """A newer otel-limits wrote the ledger, with a schema that this version does not support."""

    def __init__(self, found: int, known: int) -> None:
        """Create the error from the ledger's schema version and the latest known one."""
        super().__init__(found, known)
        self.found = found
        self.known = known

    def __str__(self) -> str:
        """Return both versions, and the fix."""
        return (
            f"The ledger has schema version {self.found}, and this otel-limits supports versions "
            f"up to {self.known}. Install the otel-limits that wrote it, or a later one."
        )


class LimitReachedError(Exception):
    """A limit was reached and the action is `raise`.

    The agent's history is valid and the agent can be called again.

    Attributes:
        observed: The usage.
        cap: The limit.
        stop: How the invocation ended, or `None` if the exception was not raised by a halt.
    """

    limit: str = "limit"
    unit: str = ""
    stop: Stop | None = None

    def __init__(self, observed: Number, cap: Number) -> None:
        """Create the error from the usage and the cap."""
        super().__init__(observed, cap)
        self.observed = observed
        self.cap = cap

    def __str__(self) -> str:
        """Return the sentence of the halt, as in its message, log line and span."""
        return self.stop.sentence if self.stop is not None else self._fallback_message()

    def _fallback_message(self) -> str:
        """Return the limit with its usage and cap."""
        return f"{self.limit} reached: {shortest(self.observed)} of {self.cap} {self.unit} used."


class MaxIterationsReachedException(LimitReachedError):  # noqa: N818  Strands' spelling
    """`max_iterations` was reached in one pass of the agent loop."""

    limit = "max_iterations"
    unit = "turns"

    def __init__(self, iterations: int, max_iterations: int) -> None:
        """Create the error from the turns of the leg and the cap."""
        super().__init__(iterations, max_iterations)
        self.iterations = iterations
        self.max_iterations = max_iterations


class MaxTurnsReachedException(LimitReachedError):  # noqa: N818  Strands' spelling
    """`max_turns` was reached."""

    limit = "max_turns"
    unit = "turns"

    def __init__(self, turns: int, max_turns: int) -> None:
        """Create the error from the turns of the invocation and the cap."""
        super().__init__(turns, max_turns)
        self.turns = turns
        self.max_turns = max_turns


class MaxModelCallsReachedError(LimitReachedError):
    """`max_model_calls` was reached."""

    limit = "max_model_calls"
    unit = "model calls"


class MaxTokenBudgetReachedException(LimitReachedError):  # noqa: N818  Strands' spelling
    """`max_token_budget` was reached."""

    limit = "max_token_budget"
    unit = "tokens"

    def __init__(self, tokens: int, max_token_budget: int) -> None:
        """Create the error from the tokens of the invocation and the cap."""
        super().__init__(tokens, max_token_budget)
        self.tokens = tokens
        self.max_token_budget = max_token_budget


class MaxInputTokensReachedError(LimitReachedError):
    """`max_input_tokens` was reached."""

    limit = "max_input_tokens"
    unit = "input tokens"


class MaxOutputTokensReachedError(LimitReachedError):
    """`max_output_tokens` was reached."""

    limit = "max_output_tokens"
    unit = "output tokens"


class MaxToolCallsReachedError(LimitReachedError):
    """A call was refused by `max_tool_calls`, or by the cap of a single tool."""

    limit = "max_tool_calls"
    unit = "tool calls"


class MaxCostReachedError(LimitReachedError):
    """`max_cost_usd` was reached."""

    limit = "max_cost_usd"
    unit = "USD"


class MaxDurationReachedError(LimitReachedError):
    """`max_duration_seconds` was reached."""

    limit = "max_duration_seconds"
    unit = "seconds"


class LoopDetectedError(LimitReachedError):
    """The agent repeats itself.

    Attributes:
        tool_name: The repeated tool, if it is a tool.
        count: The number of repetitions.
    """

    limit = "a loop limit"

    def __init__(self, tool_name: str | None, count: int) -> None:
        """Create the error from the repeated tool and the number of repetitions."""
        super().__init__(count, count)
        # The arguments that unpickling passes to `__init__`.
        self.args = (tool_name, count)
        self.tool_name = tool_name
        self.count = count

    def _fallback_message(self) -> str:
        """Return the tool and the number of repetitions."""
        tool = f" of tool {quoted(self.tool_name)}" if self.tool_name else ""
        return f"loop detected: {self.count} repetitions{tool}."


class QuotaExceededError(LimitReachedError):
    """A quota, or the budget of a gateway, is exhausted."""

    limit = "quota"


class QuotaUnavailableError(LimitReachedError):
    """A quota could not be checked, because its store is unavailable."""

    limit = "quota"

    def _fallback_message(self) -> str:
        """Return the reason."""
        return "The quota could not be checked: its store is unavailable."


class KilledError(LimitReachedError):
    """The invocation was killed."""

    limit = "killed"

    def __init__(self, observed: Number = 1, cap: Number = 0) -> None:
        """Create the error; a kill has no usage or cap."""
        super().__init__(observed, cap)

    def _fallback_message(self) -> str:
        """Return the reason."""
        return "The invocation was killed."


class StopNote(str):
    """A note of an exception that is not ours, about the stop that it caused.

    Attributes:
        stop: How the invocation ended.
    """

    __slots__ = ("stop",)
    stop: Stop

    @classmethod
    def add(cls, error: BaseException, stop: Stop) -> None:
        """Add a note about `stop` to `error`."""
        note = cls(stop.sentence)
        note.stop = stop
        # Not `add_note`, which Python 3.10 does not have.
        error.__notes__ = [*getattr(error, "__notes__", ()), note]


def stop_of_error(error: BaseException) -> Stop | None:
    """Return the stop that an exception was raised for, if any."""
    notes = (note.stop for note in getattr(error, "__notes__", ()) if isinstance(note, StopNote))
    return error.stop if isinstance(error, LimitReachedError) else next(notes, None)


BY_REASON: Final[Mapping[str, type[LimitReachedError]]] = {
    "max_iterations": MaxIterationsReachedException,
    "max_turns": MaxTurnsReachedException,
    "max_model_calls": MaxModelCallsReachedError,
    "max_token_budget": MaxTokenBudgetReachedException,
    "max_input_tokens": MaxInputTokensReachedError,
    "max_output_tokens": MaxOutputTokensReachedError,
    "max_tool_calls": MaxToolCallsReachedError,
    "max_cost_usd": MaxCostReachedError,
    "max_duration": MaxDurationReachedError,
    "loop_detected": LoopDetectedError,
    "quota_exceeded": QuotaExceededError,
    "quota_unavailable": QuotaUnavailableError,
    "killed": KilledError,
}


def limit_reached(verdict: Verdict, stop: Stop) -> LimitReachedError:
    """Create the exception for `verdict`."""
    breach = verdict.breach
    error: LimitReachedError
    # A kill has no breach.
    if breach is None:
        error = KilledError()
    elif breach.reason == "loop_detected":
        error = LoopDetectedError(breach.subject, int(breach.observed))
    else:
        error = BY_REASON.get(breach.reason, LimitReachedError)(
            *cast("tuple[int, int]", (breach.observed, breach.cap))
        )
    # The run may not have recorded this halt, or another one, e.g. a would-be halt.
    error.stop = replace(
        stop,
        breach=breach,
        breaches=verdict.breaches,
        sentence=for_operator(stop.agent, verdict, stop.action),
    )
    return error
