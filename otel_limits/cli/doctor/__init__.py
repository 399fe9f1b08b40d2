"""`otel-limits doctor`: proves by a runaway agent that limits hold, and examines the settings."""
