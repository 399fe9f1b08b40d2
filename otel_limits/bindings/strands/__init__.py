"""Tracks and halts Strands agents.

`strands_framework` is its interface to other packages; no module in here imports it. `patches`
intercepts the start and end of invocations, `attach` adds hooks (`leg_hooks`, `tool_hooks`) and
stages (`stages`) to an agent, `tracked_requests` tracks requests to providers, `halting` decides
and acts, `marks` is shared by all of them, and `private` lists the private names of Strands in use.
"""
