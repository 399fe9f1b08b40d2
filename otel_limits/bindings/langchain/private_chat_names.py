"""Every private name of LangChain's model packages that is used, with its reason."""

from __future__ import annotations

from typing import Any, Final

OF_OPENAI: Final = "_convert_chunk_to_generation_chunk"
"""Of langchain-openai, and of the packages built on it."""
OF_ANTHROPIC: Final = "_make_message_chunk_from_anthropic_event"
"""Of langchain-anthropic."""
CONVERTERS: Final = (OF_OPENAI, OF_ANTHROPIC)
"""Methods of model classes that convert a part of a stream.

They drop stated costs and the tier that was served, and there is no public name. Without them,
streamed calls cost what the price list says, at the tier of the request.
"""


def usage_in_part(_: Any, part: Any, *__: Any, **___: Any) -> object:
    """Return the vendor's usage in what one of `CONVERTERS` converts; `None` if there is none."""
    if isinstance(part, dict):
        return part.get("usage")
    return getattr(getattr(part, "message", None), "usage", None)  # Anthropic's message_start
