"""Modules that Python imports at startup, before a program and without the rest of the package."""
