"""The live state of a fleet, derived from its metrics, for `otel-limits top`."""
