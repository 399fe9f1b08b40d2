"""Facts about each vendor, with their sources.

In: YAML files in this folder, one for each vendor, which are read on first use.
Out: records: names, hosts, kinds of tokens, and how a vendor counts and bills.
May touch: its files, with `yaml`.
"""
