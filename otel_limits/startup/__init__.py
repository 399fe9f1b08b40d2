"""What a Python that has just started imports: as little as can be, from a path of its own."""
