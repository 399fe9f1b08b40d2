"""Questions about a ledger: spend, stops, and the effect of other limits.

Each has its own module, listed in `questions.py`, which turns rows into tables, independent of any
display. Parts of one question are `by_tool.py`, `outcomes.py`, `compare.py`, `forecast.py`,
`stated_costs.py` and `uncounted.py` of `spend`, `turns.py` of `show`, `counters.py`,
`reconcile_bill.py`, `bill_*.py` and `bills/` of `reconcile`, and `findings.py` and `closes.py` of
`verify`. The other modules are used by several.
"""
