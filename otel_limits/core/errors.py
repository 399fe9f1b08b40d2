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
from typing import TYPE_CHECKING, Final, cast

from otel_limits.core.halts import halt_sentence

if TYPE_CHECKING:
    from otel_limits.core.events import Stop
    from otel_limits.core.policy import Verdict
    from otel_limits.core.usage import Number


class ConfigurationError(ValueError):
    """Settings that cannot be used.

    Attributes:
        mistakes: One sentence per mistake.
    """

    def __init__(self, mistakes: Sequence[str]) -> None:
        """Keep the sentences apart for those who print them one by one."""
        # The list itself is the argument: an exception is pickled, and copied, by its arguments.
        super().__init__(mistakes)
        self.mistakes = tuple(mistakes)

    def __str__(self) -> str:
        """Every sentence, one per line."""
        return "\n".join(self.mistakes)


class LedgerError(Exception):
    """A question to the ledger cannot be answered; the sentence says why and what to do."""


class LedgerMovedError(LedgerError):
    """Somebody began to write a ledger while it was asked without write access: ask again."""


class NewerLedgerError(LedgerError):
    """A newer otel-limits wrote the ledger, and this one does not understand it."""

    def __init__(self, found: int, known: int) -> None:
        """Take the version of the tables, and the latest that this program knows."""
        super().__init__(found, known)
        self.found = found
        self.known = known

    def __str__(self) -> str:
        """Say both, and what to do."""
        return (
            f"The ledger has schema version {self.found}, and this otel-limits knows versions up "
            f"to {self.known}. Install the otel-limits that wrote it, or a later one."
        )


class LimitReachedError(Exception):
    """A limit was reached and the action is `raise`.

    The agent's history is valid and the agent can be called again.

    Attributes:
        observed: What had been used.
        cap: What the limit permits.
        stop: How the invocation ended, or `None` when the exception was not raised by a halt.
    """

    limit: str = "limit"
    unit: str = ""
    stop: Stop | None = None

    def __init__(self, observed: Number, cap: Number) -> None:
        """Take what was used and what is permitted."""
        super().__init__(observed, cap)
        self.observed = observed
        self.cap = cap

    def __str__(self) -> str:
        """Say what message, log and span say of the halt, where one raised this."""
        stop = self.stop
        if stop is None:
            return self._fallback_message()
        return halt_sentence(stop.agent, stop.reason, stop.action, stop.breach)

    def _fallback_message(self) -> str:
        """Name the limit, what it permits and what was used."""
        return f"{self.limit} reached: {self.observed} of {self.cap} {self.unit} used."


class MaxIterationsReachedException(LimitReachedError):  # noqa: N818  the name users know
    """`max_iterations` was reached within one leg of an invocation."""

    limit = "max_iterations"
    unit = "turns"

    def __init__(self, iterations: int, max_iterations: int) -> None:
        """Take the turns of the leg and what is permitted."""
        super().__init__(iterations, max_iterations)
        self.iterations = iterations
        self.max_iterations = max_iterations


class MaxTurnsReachedException(LimitReachedError):  # noqa: N818  the name users know
    """`max_turns` was reached."""

    limit = "max_turns"
    unit = "turns"

    def __init__(self, turns: int, max_turns: int) -> None:
        """Take the turns of the invocation and what is permitted."""
        super().__init__(turns, max_turns)
        self.turns = turns
        self.max_turns = max_turns


class MaxModelCallsReachedError(LimitReachedError):
    """`max_model_calls` was reached."""

    limit = "max_model_calls"
    unit = "model calls"


class MaxTokenBudgetReachedException(LimitReachedError):  # noqa: N818  the name users know
    """`max_token_budget` was reached."""

    limit = "max_token_budget"
    unit = "tokens"

    def __init__(self, tokens: int, max_token_budget: int) -> None:
        """Take the tokens of the invocation and what is permitted."""
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
    """`max_tool_calls`, or the cap of a single tool, was passed by a call that was refused."""

    limit = "max_tool_calls"
    unit = "calls"


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
        tool_name: The tool that it repeats, if it is one.
        count: How often.
    """

    limit = "a loop limit"

    def __init__(self, tool_name: str | None, count: int) -> None:
        """Take the tool and how often it was repeated."""
        super().__init__(count, count)
        # What pickling passes to `__init__` when the exception comes from another process.
        self.args = (tool_name, count)
        self.tool_name = tool_name
        self.count = count

    def _fallback_message(self) -> str:
        """Name the tool and how often."""
        tool = f" of tool {self.tool_name!r}" if self.tool_name else ""
        return f"loop detected: {self.count} repetitions{tool}."


class QuotaExceededError(LimitReachedError):
    """A quota is used up, or a gateway said that its budget is."""

    limit = "quota"


class QuotaUnavailableError(LimitReachedError):
    """Nobody knows whether a quota has enough left, because its store does not answer."""

    limit = "quota"

    def _fallback_message(self) -> str:
        """Say what could not be asked."""
        return "The quotas could not be asked: their store does not answer."


class KilledError(LimitReachedError):
    """An operator ended the invocation."""

    limit = "killed"

    def __init__(self, observed: Number = 1, cap: Number = 0) -> None:
        """There is nothing to count."""
        super().__init__(observed, cap)

    def _fallback_message(self) -> str:
        """Say no more than is known."""
        return "The invocation was killed."


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
    """Make the exception that tells of `verdict`."""
    breach = verdict.breach
    error: LimitReachedError
    # No breach is what a kill leaves: nothing was counted that could be told.
    if breach is None:
        error = KilledError()
    elif breach.reason == "loop_detected":
        error = LoopDetectedError(breach.subject, int(breach.observed))
    else:
        error = BY_REASON.get(breach.reason, LimitReachedError)(
            *cast("tuple[int, int]", (breach.observed, breach.cap))
        )
    error.stop = stop
    return error
