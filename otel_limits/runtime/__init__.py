"""Enables and disables otel-limits in a process.

In: the settings of the process, or arguments of `enable()`.
Out: bindings that follow agents, and connected observers, quotas and ledger.
May touch: the process: its import hooks, signal handlers and exit, and the files of autoload.
"""
