"""Disasters for a ledger, at full size: `python -m tests.drills`."""
