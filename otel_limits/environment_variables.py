"""Names every variable, so that `opentelemetry-instrument --limits_max_turns 30 …` works."""

from otel_limits.settings.table import SETTINGS

globals().update({setting.variable: setting.variable for setting in SETTINGS})
