"""The directory that `otel-limits run` puts first on PYTHONPATH: it holds one file."""
