"""The policy file: limits, actions, prices and exemptions by agent, model and tool."""

from otel_limits.settings.policy.document import NO_DOCUMENT, Document, Entry, Row
from otel_limits.settings.policy.file import NO_FILE, PolicyFile

__all__ = [
    "NO_DOCUMENT",
    "NO_FILE",
    "Document",
    "Entry",
    "PolicyFile",
    "Row",
]
