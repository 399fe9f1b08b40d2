"""Options of `opentelemetry-instrument`, e.g. `--limits_max_turns 30`.

The settings are declared elsewhere: see `settings/table.py`.
"""

from otel_limits.settings.table import SETTINGS

# Each name in this module that starts with OTEL_ becomes an option.
globals().update({setting.variable: setting.variable for setting in SETTINGS})
