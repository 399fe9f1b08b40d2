"""The directory that `otel-limits run` puts first on PYTHONPATH. It contains one module."""
