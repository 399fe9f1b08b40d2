"""Usage normalization for all vendors, and estimates for unreported usage."""
