"""`otel-limits demo`, its sample ledger, and the agent that `otel-limits doctor` starts."""
