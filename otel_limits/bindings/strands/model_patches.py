"""Patches the methods of model classes that call providers, and restores them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.class_patches import subclasses_of
from otel_limits.bindings.strands.private import CONVERTERS
from otel_limits.bindings.vendor_usage import reads_usage
from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from strands.agent.agent import Agent

    from otel_limits.bindings.class_patches import Patches

MODEL_METHODS: Final = ("stream", "structured_output")
"""The methods of a model that call its provider."""


def usage_in_chunk(_: Any, event: Any, **__: Any) -> object:
    """Return the vendor's usage in what a model class converts to a chunk."""
    if event.get("chunk_type") == "metadata":
        return event.get("data")
    if event.get("type") == "message_start":  # Anthropic's, whose tier the class drops
        return event["message"].get("usage")
    return None


class ModelPatcher:
    """Patches model classes, including those outside of Strands."""

    def __init__(self, patches: Patches, is_on: Callable[[], bool]) -> None:
        """Patch no class yet. No class is patched while `is_on` returns False."""
        self._patches = patches
        self._is_on = is_on

    def watch_classes_of(self, model: Any) -> None:
        """Patch every subclass of `model`, including those defined later."""
        self._patches.watch_subclasses(model, suppress_errors("binding")(self._watch_class))

    @suppress_errors("binding")
    def watch_of(self, agent: Agent) -> None:
        """Patch every model that may be called, including models that no agent has."""
        for model in (agent.model, agent.aux_model):
            self._watch_model(model)
        self.watch_all()

    @suppress_errors("binding")
    def watch_all(self) -> None:
        """Patch all model classes: a node of a graph may call one without an agent."""
        from strands.models import Model

        # At every invocation: an `__init_subclass__` may not call its parent's.
        for derived in subclasses_of(Model):
            self._watch_class(derived)

    def _watch_model(self, model: Any) -> None:
        """Patch the class of a model, as an attribute of the object would be copied with it."""
        for name in MODEL_METHODS:
            owner = next((each for each in type(model).__mro__ if name in vars(each)), None)
            if owner is not None:
                self._watch_class(owner)

    def _watch_class(self, owner: type) -> None:
        """Patch a class; inherited methods are patched in its parents."""
        if self._is_on() and not all((owner, name) in self._patches for name in MODEL_METHODS):
            from otel_limits.bindings.strands import tracked_requests as requests

            self._patches.wrap(owner, "stream", requests.track_stream)
            self._patches.wrap(owner, "structured_output", requests.track_structured_output)
            for name in CONVERTERS:
                if name in vars(owner):
                    self._patches.wrap(owner, name, reads_usage(usage_in_chunk))
