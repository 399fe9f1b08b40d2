"""Observers, independent of each other, listed in `OBSERVERS` of `runtime/wiring.py`."""
