"""Reads answers that a model streams while a method that returns whole answers runs.

LangChain does so if a reader of the graph asks for messages or events, and shows the parts to
callbacks only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager

if TYPE_CHECKING:
    from collections.abc import Callable


class AnswerEndedError(BaseException):
    """Ends an answer from a callback: LangChain only logs those that are an `Exception`."""


class AnswerReader(BaseCallbackHandler):
    """Notes each part of an answer, and ends the answer if its invocation was ended.

    Args:
        note: Called with each part.
        is_cut: Returns, after each part, whether the invocation was ended.
    """

    run_inline = True
    ignore_chat_model = True

    def __init__(self, note: Callable[[Any], object], is_cut: Callable[[], bool]) -> None:
        """Create a reader."""
        self._note = note
        self._is_cut = is_cut

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, **_: Any) -> None:  # noqa: ARG002
        """Note a part."""
        if chunk is not None:
            self._note(chunk.message)
        if self._is_cut():
            raise AnswerEndedError


def with_reader(callbacks: Any, reader: AnswerReader) -> Any:
    """Return the callbacks of a request with a reader, which requests within it do not inherit."""
    manager = callbacks.copy() if isinstance(callbacks, BaseCallbackManager) else None
    if manager is None:
        handlers = list(callbacks or ())
        manager = BaseCallbackManager(handlers=handlers, inheritable_handlers=[*handlers])
    manager.add_handler(reader, inherit=False)
    return manager
