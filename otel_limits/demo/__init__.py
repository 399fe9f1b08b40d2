"""`otel-limits demo`, its sample fleet, and the agent that `otel-limits doctor` starts.

In: the options of the command.
Out: a halt that a newcomer can watch, a sample ledger, or a fleet that runs until Ctrl-C.
May touch: a ledger, a port and scripted models that it makes for this; `rich`.
"""
