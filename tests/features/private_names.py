"""Finds the private names of a framework in the code of its binding."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

PRIVATE: Final = re.compile(r"_{1,2}[A-Za-z]\w*(?<!__)")
"""A private name; not one such as `__init__`, nor the end of a word."""


def private_names_in(binding: ModuleType) -> frozenset[str]:
    """Return the private names that a binding uses and does not define itself."""
    assert binding.__file__ is not None
    trees = [ast.parse(each.read_text()) for each in Path(binding.__file__).parent.glob("*.py")]
    used = {name for tree in trees for name in _used(tree) if PRIVATE.fullmatch(name)}
    return frozenset(used - {name for tree in trees for name in _defined(tree)})


def _used(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)  # a name for `getattr`, or a key
        elif isinstance(node, ast.Call):  # such as `getattr`
            yield from (str(each.value) for each in node.args[1:] if isinstance(each, ast.Constant))
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
            yield from (each.name for each in node.names)


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
