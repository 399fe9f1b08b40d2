"""The price list against a second one."""
