"""The command `otel-limits top`: the fleet live in the terminal."""
