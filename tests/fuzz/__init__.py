"""Garbage for every parser: a cap that was set holds, or is rejected with a message."""
