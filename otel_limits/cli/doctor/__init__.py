"""`otel-limits doctor`: verifies enforcement with a runaway agent and checks settings."""
