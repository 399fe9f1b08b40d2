"""Entry point of `python -m otel_limits.cli`."""

import sys

from otel_limits.cli import main

sys.exit(main())
