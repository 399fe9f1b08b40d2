"""A real OTLP receiver on loopback, and a real process that sends to it."""
