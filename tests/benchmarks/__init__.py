"""What otel-limits costs: `python -m tests.benchmarks` prints it as a Markdown table."""
