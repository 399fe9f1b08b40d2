"""Facts about each vendor, one record each, with their sources."""
