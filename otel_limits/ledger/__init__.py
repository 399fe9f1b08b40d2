"""The spend ledger: every model call once, in SQLite or PostgreSQL.

In: events, exported spans and logs of other tools, and the selection of a question.
Out: rows, each once, and sums of them.
May touch: the database with `sqlalchemy`, and files next to it. Only this room builds statements.

Recording: `observers/ledger.py` receives events. `rows.py` turns them into rows, whose columns are
in `schema.py`. `writer.py` collects them, and its thread writes them in batches with `database.py`.
If the database fails or is slow, `spill.py` appends them to a file, and restores them later.

Import: `otlp.py` reads the JSON or CSV of a file. `shapes.py`, and `coding_agents.py` and
`litellm_logs.py` for logs, give it the form of OTLP; `otlp.py` keeps what a ledger may record of a
span. `traces.py` decides which spans are calls and which sums count, and `duplicate_calls.py` which
calls the ledger already has. `imports.py` makes rows of them, which are then priced, inserted and
queried as live ones are.

Queries: `reading.py` opens a ledger after `waiting_rows.py` has written the rows of spill files to
it. `selection.py` has the conditions; the statements are in `spending.py` for sums of model calls,
`whole_tasks.py` for tasks, `quota_usage.py` for quotas, `reconciling.py` for what metrics and bills
count, `proof.py` for checks, and `queries.py` for the others.

Maintenance: `closing.py`, `merging.py` and `repricing.py`, and `maintenance.py` for what was
deleted, lost or accepted. Files for other programs: `file_export.py` and `focus.py`.
"""
