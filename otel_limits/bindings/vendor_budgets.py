"""Errors by which a vendor reports that its own budget is spent.

They belong to the application first: its hooks, routers and middleware see them like any other
error, and can repeat the call with another vendor. Only an error that leaves the agent's loop halts
the agent, if a limit is in force.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from otel_limits.bindings.gateways import budget_refusal
from otel_limits.core.errors import StopNote
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.runs.registry import CURRENT
from otel_limits.runs.run import Run

if TYPE_CHECKING:
    from otel_limits.bindings.admission import Admission


@suppress_errors("binding")
def is_halted_by_vendor(admission: Admission, error: Exception) -> bool:
    """Return whether an error of the loop becomes its halt, instead of leaving the agent.

    With the actions `observe` and `raise` the application gets its own error.
    """
    run = admission.run
    verdict = budget_refusal(error) if run.is_limited else None
    if verdict is None:
        return False
    action = run.policy.action
    if action == "observe":
        run.halt(verdict, "observed")
    elif action == "raise":
        run.halt(verdict, "raised")
        if text := str(error):  # which a tool returns to the model around this agent
            run.note_halt(text, verdict)
        StopNote.add(error, run.stop(verdict.reason))
    else:
        admission.verdict, admission.wrapping = verdict, None
        return True
    return False


def retry_unless_spent(original: Any) -> Any:
    """Wrap the framework's decision to repeat a failed call, which may take minutes.

    A spent budget does not come back within that time. Without a limit nothing changes.
    """

    @functools.wraps(original)
    def is_retryable(strategy: Any, exception: Exception) -> bool:
        return not _is_final(exception) and original(strategy, exception)

    return is_retryable


@suppress_errors("binding")
def _is_final(error: Exception) -> bool:
    run = CURRENT.get()
    return isinstance(run, Run) and run.is_limited and budget_refusal(error) is not None
