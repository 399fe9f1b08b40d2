"""The live state of a fleet, derived from its metrics, for `otel-limits top`.

In: samples of metrics, from processes or from a Prometheus.
Out: a `Fleet`: agents, totals, quotas and recent halts.
May touch: the addresses that the user names, with `prometheus_client` as a parser.

`scrapes.py` reads the metrics. `fleet_state.py` computes the increases between scrapes, and the
state, a `Fleet` of `fleet.py`.
"""
