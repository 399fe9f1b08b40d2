"""A clock that can be set. Imported before everything else: what takes `time.time` keeps it."""

from __future__ import annotations

import time

now = time.time

offset = [0.0]
"""Seconds by which it is wrong."""

time.time = lambda: now() + offset[0]
