"""Imported while Python starts, and therefore minimal and on its own path."""
