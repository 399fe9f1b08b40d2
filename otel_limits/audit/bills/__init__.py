"""Bills: exports of vendors and gateways, each in its own form, read into the same rows.

`bill.py` has the rows, the protocol of a reader, and all that readers share: they open files and
check values with it. `bill_reading.py` lists the readers, one file per form, and calls them.
"""
