"""OpenTelemetry: spans to follow, providers to attach to, exports to set up."""
