"""Full-size failure drills for a ledger and a quota store: `python -m tests.drills`."""
