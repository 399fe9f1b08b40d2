"""The live state of a fleet, derived from its metrics, for `otel-limits top`.

`scrapes.py` reads the metrics of processes, or `scrapes.py` those in a Prometheus: both
are a `Feed` of `scrapes.py`. `fleet_state.py` computes the increases between scrapes, and
`fleet_state.py` the state, a `Fleet` of `fleet.py`.
"""
