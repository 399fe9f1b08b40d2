"""Keeps the tasks of an interrupted graph in its checkpoint, where LangGraph keeps the interrupt.

As writes of the checkpoint that belong to no task of the graph, so LangGraph applies them nowhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.langchain.langchain_framework import LANGCHAIN
from otel_limits.core.internal_errors import suppress_errors, suppress_errors_async

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from langgraph.checkpoint.base import CheckpointTuple

    from otel_limits.runs.tasks import Task

CHANNEL: Final = "otel_limits:"
"""Prefix of the names of our writes; the rest is the key of an interrupt."""


@suppress_errors("binding")
def keep(graph: Any, thread: Any, waiting: Mapping[str, Task]) -> None:
    """Write the tasks that wait for answers into the last checkpoint of a thread.

    Args:
        graph: The graph, which has ended with interrupts.
        thread: The configuration of its thread; `None` if it has none.
        waiting: The tasks, by the keys of the interrupts.
    """
    if thread is None or not waiting:
        return
    saved = graph.checkpointer.get_tuple(thread)
    if saved is not None:
        graph.checkpointer.put_writes(saved.config, *_writes_of(waiting))


@suppress_errors_async("binding")
async def akeep(graph: Any, thread: Any, waiting: Mapping[str, Task]) -> None:
    """Do the same without blocking the event loop."""
    if thread is None or not waiting:
        return
    saved = await graph.checkpointer.aget_tuple(thread)
    if saved is not None:
        await graph.checkpointer.aput_writes(saved.config, *_writes_of(waiting))


def _writes_of(waiting: Mapping[str, Task]) -> tuple[Sequence[tuple[str, str]], str]:
    """Return the writes, and a name of their writer that no earlier writes have.

    Checkpoints keep the first write of each writer: further answers to parallel interrupts lead to
    further writes into the same checkpoint.
    """
    writes = [(CHANNEL + key, task.record()) for key, task in waiting.items()]
    resumes = max(task.resumes for task in waiting.values())
    return writes, f"{CHANNEL}{next(iter(waiting.values())).id}:{resumes}"


@suppress_errors("binding")
def recall(graph: Any, config: Any) -> None:
    """Read the tasks that a checkpoint has."""
    _recall(graph.checkpointer.get_tuple(config))


@suppress_errors_async("binding")
async def arecall(graph: Any, config: Any) -> None:
    """Do the same without blocking the event loop."""
    _recall(await graph.checkpointer.aget_tuple(config))


def _recall(saved: CheckpointTuple | None) -> None:
    host = LANGCHAIN.host
    if saved is None or host is None:
        return
    host.runs.interrupted.recall(
        (channel.removeprefix(CHANNEL), record)
        for _, channel, record in saved.pending_writes or ()
        if channel.startswith(CHANNEL)
    )
