"""The demonstration: `agent` and `server` are its two programs, `play` runs them, `show` tells."""
