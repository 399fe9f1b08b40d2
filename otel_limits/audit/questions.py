"""The questions of `otel-limits audit`.

Each has its own module, which ends with its definition: help, options, and the function that
answers it. None imports the database, the frameworks, the settings or the price list until it is
answered, since every command line builds its help from here.
"""

from __future__ import annotations

from typing import Final

from otel_limits.audit.anomalies import ANOMALIES
from otel_limits.audit.backtest import BACKTEST
from otel_limits.audit.grants import GRANTS
from otel_limits.audit.loop_report import LOOPS
from otel_limits.audit.policies import POLICIES
from otel_limits.audit.quota_budget import BUDGET
from otel_limits.audit.reconcile import RECONCILE
from otel_limits.audit.show import SHOW
from otel_limits.audit.spend import SPEND
from otel_limits.audit.stops import STOPS
from otel_limits.audit.suggest import SUGGEST
from otel_limits.audit.unmeasured import UNMEASURED
from otel_limits.audit.verify import VERIFY
from otel_limits.audit.whois import WHOIS

QUESTIONS: Final = (
    SPEND,
    STOPS,
    SHOW,
    LOOPS,
    RECONCILE,
    BACKTEST,
    SUGGEST,
    ANOMALIES,
    GRANTS,
    BUDGET,
    POLICIES,
    WHOIS,
    UNMEASURED,
    VERIFY,
)
