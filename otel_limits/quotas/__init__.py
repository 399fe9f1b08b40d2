"""Budgets over time windows, shared by many invocations and processes."""
