"""Features of each framework with otel-limits, observed in scripted agents."""
