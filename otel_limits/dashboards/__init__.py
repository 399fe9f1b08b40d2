"""Dashboards and alerts as files, and the client for Prometheus.

In: dashboards and rules that the package contains, and queries.
Out: files for Grafana, Prometheus and Kubernetes, and samples.
May touch: the directory and the Prometheus that the user names.
"""
