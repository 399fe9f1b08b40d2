"""Vendors on loopback that bill each call, and write their bills as they export them."""
