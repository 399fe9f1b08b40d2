"""The policy file: limits, actions, prices and exemptions by agent, model and tool."""

from otel_limits.policy.document import NO_DOCUMENT, Document, Entry, Row
from otel_limits.policy.file import NO_FILE, PolicyFile
from otel_limits.policy.reader import parse
from otel_limits.policy.yaml_tree import Node

__all__ = [
    "NO_DOCUMENT",
    "NO_FILE",
    "Document",
    "Entry",
    "Node",
    "PolicyFile",
    "Row",
    "parse",
]
