"""The command `otel-limits top`: the fleet live in the terminal.

`live.py` polls the metrics and reads keys. A key changes the view. `screen.py` draws it.
"""
