"""The dashboards and alerts of the package, and the client for Prometheus."""
