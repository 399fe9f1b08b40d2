"""Programs of users, which type checkers read in strict mode; what they do is tested elsewhere."""
