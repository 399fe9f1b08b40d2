"""Questions to a ledger: what was spent, what was stopped, and what other limits would have done.

Each module answers one of them, from rows to tables, and knows neither a database nor a screen.
"""
