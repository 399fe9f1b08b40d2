"""Example programs for type checkers in strict mode."""
