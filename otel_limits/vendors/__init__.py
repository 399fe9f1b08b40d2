"""What is known of each vendor, one record each, with its sources."""
