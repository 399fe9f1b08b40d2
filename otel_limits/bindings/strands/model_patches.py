"""The methods by which models ask their providers: followed in every class, and put back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from strands.agent.agent import Agent

MODEL_METHODS: Final = ("stream", "structured_output")
"""The methods by which a model asks its provider."""


class Patches:
    """What stands in the place of methods of classes, and how all of it is taken back."""

    def __init__(self) -> None:
        """Patch nothing yet."""
        self._originals: dict[tuple[Any, str], tuple[Any, Any]] = {}

    def __contains__(self, place: tuple[Any, str]) -> bool:
        """Tell whether what a class has under a name is patched."""
        return place in self._originals

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Put a wrapper in the place of what a class has under a name, where it has something."""
        # What the class itself defines: a patched copy of an inherited method would follow each
        # call twice, once here and once in the class that it comes from.
        original = vars(owner).get(name)
        if original is not None and (owner, name) not in self:
            self.put(owner, name, wrapper(original))

    def put(self, owner: Any, name: str, ours: Any) -> None:
        """Put something in the place of what a class has under a name, or has not."""
        self._originals[owner, name] = vars(owner).get(name), ours
        setattr(owner, name, ours)

    def restore(self) -> None:
        """Put every class back as it was."""
        for (owner, name), (original, ours) in self._originals.items():
            if vars(owner).get(name) is not ours:  # another instrumentation may stand around it
                continue
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._originals.clear()


class ModelPatcher:
    """Follows the classes of models, those that do not come from Strands' included."""

    def __init__(self, patches: Patches, is_on: Callable[[], bool]) -> None:
        """Follow none yet; while `is_on` says no, no further one is."""
        self._patches = patches
        self._is_on = is_on

    def watch_classes_of(self, model: Any) -> None:
        """Follow every class that is derived from `model`, also one that a running tool defines."""
        original = vars(model).get("__init_subclass__")

        def watch(derived: type, /, **kwargs: Any) -> None:
            if original is None:
                super(model, derived).__init_subclass__(**kwargs)  # type: ignore[misc]
            else:
                original.__get__(None, derived)(**kwargs)
            suppress_errors("binding")(self._watch_class)(derived)

        self._patches.put(model, "__init_subclass__", classmethod(watch))

    @suppress_errors("binding")
    def watch_of(self, agent: Agent) -> None:
        """Follow every model that may be asked: a tool may ask one that no agent has."""
        for model in (agent.model, agent.aux_model):
            self._watch_model(model)
        self.watch_all()

    @suppress_errors("binding")
    def watch_all(self) -> None:
        """Follow every class there is: a node of a graph may ask without an agent."""
        from strands.models import Model

        # At every invocation: a class may have an `__init_subclass__` that asks no parent.
        for derived in subclasses_of(Model):
            self._watch_class(derived)

    def _watch_model(self, model: Any) -> None:
        """Follow a model by its class: an attribute of an object would go along into its copies."""
        for name in MODEL_METHODS:
            owner = next((each for each in type(model).__mro__ if name in vars(each)), None)
            if owner is not None:
                self._watch_class(owner)

    def _watch_class(self, owner: type) -> None:
        """Follow what instances of a class ask; what it inherits is followed at its parents."""
        if self._is_on() and not all((owner, name) in self._patches for name in MODEL_METHODS):
            from otel_limits.bindings.strands import tracked_requests as requests

            self._patches.wrap(owner, "stream", requests.track_stream)
            self._patches.wrap(owner, "structured_output", requests.track_structured_output)


def subclasses_of(owner: type) -> list[type]:
    """Return every class that is derived from `owner`, by now; one of two parents comes twice."""
    derived: list[type] = owner.__subclasses__()
    for each in derived:  # which grows meanwhile
        derived += each.__subclasses__()
    return derived
