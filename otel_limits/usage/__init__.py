"""Usage of all vendors as one record, and estimates where a vendor reports none.

In: the usage that a vendor or a framework reports, in any spelling; or texts, images and files.
Out: a `Usage`, or an estimate that is marked as one.
May touch: its arguments.
"""
