"""Live invocations: the usage of each, and how it is going to end.

In: reports of bindings and spans: an invocation begins, a model is called, a tool ends.
Out: verdicts for the binding, and events for the observers.
May touch: the registry, which is the only shared mutable state, and the clock. It calls no code of
others while it holds a lock.

`registry` starts an invocation, a `Run` of `run`. `call_tracker` admits and counts its model calls,
each an `InFlightCall` of `calls`, and `tool_calls` its tool calls. Its `account` compares the
counts of each `budget` with the limits: its own, and those of the trees around it. `quota_gate` is
the protocol of what admits a call by quotas. `clock` calls the run when a time limit is due.
`dispatcher`, one of the `services` that all invocations share, passes its events to the observers.

`current` knows for which invocation a task or a thread works, and `spans` to which one a span
belongs, and which spans show the same model call.

More than one invocation uses `conversations`, `tasks`, and `failure_rows`.
"""
