"""Questions about a ledger: spend, stops, and the effect of other limits.

In: the options of a question, and rows or sums of `ledger`.
Out: an answer: tables and charts of exact values, independent of any display.
May touch: a ledger, bills and a Prometheus, and only to read them.

`questions.py` lists them, and each has a module. Parts of one question are `compare.py`,
`forecast.py` and `completeness.py` of `spend`, `counter_growth.py`, `reconcile_bill.py`,
`bill_differences.py` and `bills/` of `reconcile`, and `findings.py` of `verify`. The other modules
are used by several.
"""
