"""Questions about a ledger: spend, stops, and the effect of other limits.

Each has its own module in `questions`, which turns rows into tables, independent of any display.
"""
