"""Names every variable, so that `opentelemetry-instrument --limits_max_turns 30 …` works."""

from otel_limits.settings.table import SETTINGS

# `opentelemetry-instrument` makes an option of each name in this module that begins with OTEL_.
globals().update({setting.variable: setting.variable for setting in SETTINGS})
