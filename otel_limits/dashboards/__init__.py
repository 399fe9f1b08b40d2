"""The dashboards and alerts that come with the package: written out, or drawn without Grafana."""
