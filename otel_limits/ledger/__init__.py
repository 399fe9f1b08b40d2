"""The spend ledger: every model call once, in SQLite or PostgreSQL.

Recording: `observers/ledger.py` receives events. `rows.py` turns them into rows, whose columns are
in `schema.py`. `writer.py` collects them in `writer.py`, and a thread writes them in batches with
`database.py` and `database.py`. If the database fails or is slow, `spill.py` appends them to a
file, and restores them later.

Import: `otlp.py` reads the JSON or CSV of a file. `shapes.py`, and `coding_agents.py` and
`litellm_logs.py` for logs, give it the form of OTLP. `otlp.py` keeps what a ledger may record of a
span. `traces.py` decides which spans are calls, `traces.py` which sums count, and
`duplicate_calls.py` which calls the ledger already has. `imports.py` makes rows of them, which are
then priced, inserted and queried as live ones are.

Queries: `reading.py` opens a ledger after `reading.py` has taken in the rows of spill files.
`selection.py` has the conditions; the statements are in `spending.py` for sums of model calls,
`whole_tasks.py` for tasks, `queries.py` for tool calls, `quota_usage.py` for quotas,
`reconciling.py` for what metrics count, `reconciling.py` for bills, `queries.py` for names,
`proof.py` for checks, and `queries.py` for the others.

Maintenance: `closing.py`, `maintenance.py`, `merging.py`, `repricing.py` and `maintenance.py`. The ledger's
own records of deleted and lost rows: `maintenance.py`. Files for other programs: `file_export.py`
and `focus.py`.

Only this room builds statements.
"""
