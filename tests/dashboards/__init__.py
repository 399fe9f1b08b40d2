"""The dashboards and alerts, held against a real Prometheus."""
