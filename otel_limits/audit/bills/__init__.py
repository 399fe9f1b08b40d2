"""Bills: exports of vendors and gateways, each in its own form, read into the same rows.

`bill.py` has the rows and the protocol of a reader, `bill_files.py` opens files, and
`known_bills.py` lists the readers, one file per form.
"""
