"""Questions to a ledger: what was spent, what was stopped, and what other limits would have done.

`questions` lists them: each has a module of its own, from rows to tables, which knows no screen.
"""
