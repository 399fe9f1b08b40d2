"""Bills: exports of vendors and gateways, each in its own form, read into the same rows.

`bill.py` has the rows and the protocol of a reader, `bill.py` opens files, and
`bill_reading.py` lists the readers, one file per form, and reads files with them.
"""
