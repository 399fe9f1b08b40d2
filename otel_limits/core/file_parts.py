"""Parts of a policy file as models of pydantic, and what is wrong with a part in sentences.

Imported only by processes that read a policy file, because importing pydantic takes longer than
importing otel-limits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import no_info_plain_validator_function

from otel_limits.core.secrets import redact_value
from otel_limits.core.values import item_of
from otel_limits.core.wording import suggestion

if TYPE_CHECKING:
    from pydantic_core import CoreSchema, ErrorDetails

    from otel_limits.core.values import Kind

KeyPath: TypeAlias = tuple[int | str, ...]
"""Keys and indexes that lead to a value."""


@dataclass(frozen=True)
class Of:
    """A kind of values as an annotation: `Annotated[Any, Of(CAP)]`.

    So a rule is written once for variables, options, code, files and the schema, and nothing is
    converted that its kind does not convert.
    """

    kind: Kind[Any]

    def __get_pydantic_core_schema__(self, *_: object) -> CoreSchema:
        """Check a value by its kind."""
        return no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(self, *_: object) -> dict[str, Any]:
        """Return the schema of the kind, as a copy that pydantic may change."""
        copied: dict[str, Any] = json.loads(json.dumps(self.kind.schema))
        return copied

    def _checked(self, value: object) -> Any:
        try:
            return self.kind.of_value("", value)
        except ValueError:
            # Its sentence needs the key and the text in the file: see `_of_value`.
            raise PydanticCustomError("kind", "invalid", {"kind": self.kind}) from None


class Part(BaseModel):
    """A mapping with known keys."""

    model_config = ConfigDict(extra="forbid")

    def given(self) -> dict[str, Any]:
        """Return what the file sets, by key."""
        return {name: value for name, value in self if name in self.model_fields_set}

    @classmethod
    def keys_of(cls) -> list[str]:
        """Return its keys, as they are written."""
        return [field.alias or name for name, field in cls.model_fields.items()]


def optional(text: str, **more: Any) -> Any:
    """Describe a key that a file may leave out."""
    return Field(None, description=text, **more)


def mistakes_in(
    value: object, model: type[Part], shown: Callable[[KeyPath], str]
) -> Iterator[tuple[KeyPath, str]]:
    """Yield the path of each mistake, and a sentence with the key, the problem and the fix.

    Args:
        value: What the file contains.
        model: What it must be.
        shown: Returns the text of a value in the file.
    """
    try:
        model.model_validate(value)
    except ValidationError as errors:
        for error in errors.errors(include_url=False):
            path = error["loc"]
            # A name that is invalid itself.
            if path[-1:] == ("[key]",) and path[-2:-1] == (error["input"],):
                path = path[:-1]
            yield path, _sentence(error, *_part_at(path, model), shown(path))


def _part_at(path: KeyPath, model: type[Part]) -> tuple[str, type[Part]]:
    """Return a key as in messages, and the innermost part that contains it."""
    key, part = "", model
    here: Any = model
    for step in path:
        if isinstance(here, type) and issubclass(here, Part):
            part = here
            key += f".{redact_value(str(step))}"
            here = here.model_fields[step].annotation if step in here.model_fields else None
        else:
            key = f"{key}[{step}]" if isinstance(step, int) else item_of(key, step)
            here = get_args(here)[-1]
    return key.removeprefix("."), part


def _sentence(error: ErrorDetails, key: str, part: type[Part], written: str) -> str:
    name = str(error["loc"][-1]) if error["loc"] else ""
    match error["type"]:
        case "kind":
            return _of_value(error, key, written)
        case "value_error":  # continues the key
            return f"{key}{error['ctx']['error']}"
        case "extra_forbidden":
            valid = part.keys_of()
            hint = suggestion(name, valid, f"Valid keys: {', '.join(valid)}.")
            return f"Unknown key {key}. {_place_of(name, part) or hint}"
        case "missing":
            owner = key.removesuffix(f".{name}")
            return f"{owner} needs {name}: {part.model_fields[name].description}"
        case "list_type":
            return f"{key} must be a list, got {written}."
        case _:
            field = part.model_fields.get(name)
            example = field.examples[0] if field and field.examples else {}
            inner = ", ".join(f"{key}: {_flow(value)}" for key, value in example.items())
            such = f", such as {inner}," if inner else ","
            # Another file, such as .env, may be full of secrets.
            whole: dict[type, str] = {} if key else {str: "text", list: "a list"}
            got = whole.get(type(error["input"]), written)
            got = "an empty one" if error["type"] == "too_short" else got
            return f"{key or 'The file'} must be a mapping{such} got {got}."


def _flow(value: object) -> str:
    """Return a value on one line, as YAML."""
    return json.dumps(value).replace('"', "") if isinstance(value, Mapping) else str(value)


def _place_of(name: str, part: type[Part]) -> str:
    """Return where a key belongs that is written one or two levels too high; else nothing."""
    inner = {
        owner: field.annotation
        for owner, field in part.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Part)
    }
    below = {
        f"{owner}: {key}": each
        for owner, middle in inner.items()
        for key, field in middle.model_fields.items()
        if isinstance(each := field.annotation, type) and issubclass(each, Part)
    }
    for path, each in {**inner, **below}.items():
        # An environment variable has the section in its name: tree_max_turns.
        for key in (name, name.removeprefix(f"{path.split()[-1]}_")):
            if key in each.keys_of():
                return f'Write {"it" if key == name else key} under "{path}:".'
    return ""


def _of_value(error: ErrorDetails, key: str, written: str) -> str:
    try:
        error["ctx"]["kind"].of_value(key, error["input"], written)
    except ValueError as reason:
        return str(reason)
    raise AssertionError(f"{key} is valid")  # pragma: no cover
