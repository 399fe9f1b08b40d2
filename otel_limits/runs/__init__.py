"""Live invocations: what each has used, and how it is going to end.

`registry` starts an invocation, a `Run` of `run`, which counts its model calls (`calls`), tools and
time. `budget` compares the counts with the limits: its own, and those of the trees around it.
`clock` calls the run when a time limit is due. `dispatcher` passes its events to the observers.

`current` knows for which invocation a task or a thread works, `spans` to which one a span belongs,
and `span_tree` and `responses` which spans show the same model call.

More than one invocation uses `conversations`, `tasks` with their `task_records`, and
`failure_rows`.
"""
