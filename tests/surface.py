"""The surface of otel-limits: everything that users write, read or import.

`python -m tests.generate surface` writes it to `tests/surface.txt`. Users notice a change of that
file, so it needs a line in the changelog.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args, get_origin

import otel_limits
import otel_limits.frameworks
import otel_limits.testing
from otel_limits.audit.questions import QUESTIONS
from otel_limits.bindings.entry_points import GROUP
from otel_limits.cli import quotas
from otel_limits.cli.doctor import finding
from otel_limits.cli.doctor.finding import Finding
from otel_limits.cli.parser import make_parser
from otel_limits.cli.show.data import schema_of
from otel_limits.core import errors
from otel_limits.core.events import Event, Invocation
from otel_limits.demo import main as runaway_demo
from otel_limits.ledger.schema import METADATA
from otel_limits.observers.metrics import METRICS
from otel_limits.quotas.remaining import KeyUse
from otel_limits.settings.table import SETTINGS
from otel_limits.top import fleet
from tests.policy_schema import schema as policy_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

PATH: Final = Path(__file__).parent / "surface.txt"


def write() -> None:
    """Write it."""
    PATH.write_text(text(), encoding="utf-8")


def text() -> str:
    """Return all parts, each with its sorted lines."""
    return "\n".join(
        f"# {title}\n" + "".join(f"{line}\n" for line in sorted(set(lines())))
        for title, lines in PARTS.items()
    )


def command_lines() -> Iterator[str]:
    """Yield each command with each option and its choices."""
    yield from _arguments("otel-limits", make_parser())


def _arguments(command: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield command
    for action in parser._actions:  # argparse has no public list of them
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from _arguments(f"{command} {name}", below)
        else:
            names = ", ".join(action.option_strings) or action.dest
            choices = f" {{{','.join(map(str, action.choices))}}}" if action.choices else ""
            yield f"{command} {names}{choices}"


def variables() -> Iterator[str]:
    """Yield each environment variable with its default."""
    for setting in SETTINGS:
        yield f"{setting.variable} = {setting.default}"


def policy_keys() -> Iterator[str]:
    """Yield each key of the policy file; `*` is any name, `[]` an element of a list."""
    schema = policy_schema()
    yield from _keys(schema, schema["$defs"])


def answers() -> Iterator[str]:
    """Yield each key of the JSON that commands print."""
    for question in QUESTIONS:
        for key in _keys(schema_of(question)):
            yield f"audit {question.name}: {key}"
    for command, functions, classes in (
        ("doctor", (finding.as_json,), (Finding,)),
        ("quotas", (quotas.as_json,), (KeyUse,)),
        ("top", (fleet.as_json,), (fleet.AgentRow, fleet.Totals, fleet.QuotaRow, fleet.RecentHalt)),
        ("demo", (runaway_demo.as_json, runaway_demo.scenario_json), ()),
    ):
        for key in (*_written(*functions), *(name for kind in classes for name in _fields(kind))):
            yield f"{command}: {key}"


def _keys(schema: Mapping[str, Any], definitions: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Yield the path of each property of a JSON Schema."""
    if reference := schema.get("$ref"):
        schema = (definitions or {})[reference.rsplit("/", 1)[-1]]
    inner = {**schema.get("properties", {}), **schema.get("patternProperties", {})}
    if isinstance(schema.get("additionalProperties"), dict):
        inner["*"] = schema["additionalProperties"]
    for name, part in inner.items():
        yield name
        yield from (f"{name}.{key}" for key in _keys(part, definitions))
    if isinstance(schema.get("items"), dict):
        yield from (f"[].{key}" for key in _keys(schema["items"], definitions))
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from _keys(part, definitions)


def _written(*functions: Callable[..., Any]) -> Iterator[str]:
    """Yield the keys of the dictionaries that functions write out."""
    for function in functions:
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
            if isinstance(node, ast.Dict):
                yield from (
                    key.value
                    for key in node.keys
                    if isinstance(key, ast.Constant) and isinstance(key.value, str)
                )


def _fields(kind: type[Any]) -> Iterator[str]:
    return (field.name for field in dataclasses.fields(kind))


def metrics() -> Iterator[str]:
    """Yield each metric with its OpenTelemetry name, kind, unit, labels and fixed values."""
    for metric in METRICS:
        values = f" {{{','.join(metric.values)}}}" if metric.values else ""
        labels = ", ".join(metric.labels)
        yield f"{metric.name} {metric.otel_name} {metric.kind} [{metric.unit}] ({labels}){values}"


def columns() -> Iterator[str]:
    """Yield each column of the ledger with its type."""
    for table in METADATA.tables.values():
        for column in table.columns:
            yield f"{table.name}.{column.name} {column.type}"


def event_fields() -> Iterator[str]:
    """Yield each field of each event with its type."""
    for kind in (Invocation, *get_args(Event)):
        for field in dataclasses.fields(kind):
            yield f"{kind.__name__}.{field.name}: {field.type}"


def exceptions() -> Iterator[str]:
    """Yield each exception with its base classes."""
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, Exception):
            yield f"{name}({', '.join(base.__name__ for base in kind.__bases__)})"


def entry_points() -> Iterator[str]:
    """Yield each group of entry points that other distributions can add to."""
    yield GROUP


def public_names() -> Iterator[str]:
    """Yield each public name, with its parameters if it has them."""
    for module in (otel_limits, otel_limits.testing, otel_limits.frameworks):
        for name in module.__all__:
            value, shown = getattr(module, name), f"{module.__name__}.{name}"
            if name not in FOR_BINDINGS:
                yield f"{shown}{_parameters(value)}"
            for member in FOR_BINDINGS.get(name, ()):
                yield f"{shown}.{member}{_parameters(getattr(value, member, None))}"


FOR_BINDINGS: Final[Mapping[str, Sequence[str]]] = {
    "BaseFramework": (
        *("host", "invocation", "patches", "stop_reasons", "successes"),
        *("gaps", "marker_of", "release", "run_script", "stops_of", "watch"),
    ),
    "InvocationInProgress": (
        *("start_if_on", "reason_of", "result_of_halt", "result_of_question", "interrupts_of"),
        "with_marker",
    ),
    "ModelCallInProgress": (
        *("start", "describe", "tool_results", "send", "add_note", "remove_tools", "nudge"),
        *("note_part", "note_text", "note_end_of_parts", "note_answer", "note", "note_failure"),
        *("partial_answer", "text_of", "tools_of", "flaw_of_last", "end_with_last"),
        *("halted", "halted_parts", "asked", "asked_parts", "calls", "model", "obstacle"),
    ),
    "ToolCallInProgress": (*("start", "refused", "text_of", "with_text", "is_error", "is_pause"),),
}
"""Names that bindings use, of the classes that they derive theirs from; all others are internal."""


def _parameters(value: object) -> str:
    # Classes of a framework have its fields, and an alias has a signature in Python 3.10 alone.
    if not callable(value) or hasattr(value, "model_fields") or get_origin(value) is not None:
        return ""
    try:
        names = inspect.signature(value).parameters.values()
    except ValueError:  # a built-in
        return ""
    shown = (str(name).partition(":")[0].partition("=")[0].strip() for name in names)
    return f"({', '.join(shown)})"


PARTS: Final[Mapping[str, Callable[[], Iterator[str]]]] = {
    "Commands and options": command_lines,
    "Environment variables": variables,
    "Keys of the policy file": policy_keys,
    "Keys of JSON output": answers,
    "Metrics": metrics,
    "Columns of the ledger": columns,
    "Fields of events": event_fields,
    "Exceptions": exceptions,
    "Entry points": entry_points,
    "Public names": public_names,
}
