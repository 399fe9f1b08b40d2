"""Spans that instrumentations of LLM clients make, and the script that makes them again."""
