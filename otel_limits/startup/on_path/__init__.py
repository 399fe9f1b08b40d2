"""The directory that goes first on PYTHONPATH. It contains one module."""
