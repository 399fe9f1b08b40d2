"""The demonstration: `play` runs `agent` against `server`, and `show` says what happened."""
