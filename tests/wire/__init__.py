"""Vendors' wire formats from a server on loopback, read by Strands' real model classes."""
