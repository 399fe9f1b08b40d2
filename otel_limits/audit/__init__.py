"""Questions about a ledger: spend, stops, and the effect of other limits.

Each has its own module, listed in `questions.py`, which turns rows into tables, independent of any
display. Parts of one question are `spend.py`, `spend.py`, `compare.py`, `forecast.py`,
`spend.py` and `completeness.py` of `spend`, `show.py` of `show`, `reconcile.py`,
`reconcile_bill.py`, `bill_*.py` and `bills/` of `reconcile`, and `findings.py` and `verify.py` of
`verify`. The other modules are used by several.
"""
