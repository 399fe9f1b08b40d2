"""Observers: receivers of events, independent of each other.

In: events, one at a time, in the order of each invocation.
Out: metrics, log lines, rows for the ledger, and the tool log.
May touch: `prometheus_client`, OpenTelemetry's meters and loggers, the log, and the files of the
ledger and the tool log. Never the event, and never the agent.

`OBSERVERS` of `runtime/wiring.py` lists them.
"""
