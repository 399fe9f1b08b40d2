"""Budgets over time windows, shared by many processes. `stores` lists where they are counted."""
