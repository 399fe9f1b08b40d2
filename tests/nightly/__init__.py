"""Measurements that take minutes, for a nightly run: each module is a command."""
