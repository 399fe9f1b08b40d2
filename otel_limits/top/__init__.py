"""A fleet as its metrics tell it now: what `otel-limits top` reads, and what it makes of it."""
