"""Dashboards as code: `python -m dashboards.build` writes the JSON that is committed."""
