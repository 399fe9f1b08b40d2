"""An adjustable clock. Import it first: modules that import `time.time` keep the original."""

from __future__ import annotations

import time

now = time.time

offset = [0.0]
"""The clock's error, in seconds."""

time.time = lambda: now() + offset[0]
