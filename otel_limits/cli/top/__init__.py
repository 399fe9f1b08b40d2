"""The command `otel-limits top`: the fleet live in the terminal.

`live` polls the metrics and reads keys by `keyboard`. A key changes the `view`. `screen` draws it,
with the table of `columns`.
"""
