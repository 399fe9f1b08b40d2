"""Dashboards as code: `python -m tests.generate dashboards` writes the JSON that is committed."""
