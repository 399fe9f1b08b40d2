"""Output formats of an answer: terminal, JSON, CSV, HTML."""
