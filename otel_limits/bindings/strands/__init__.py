"""Tracks and halts Strands agents.

`strands_framework` is its interface to other packages, and imports those that need Strands on first
use. `patches` intercepts the start and end of invocations, and `agent_hooks` adds its hooks and its
middleware to an agent: `leg_stage` for each leg, and `loop_requests` for each response.

It differs from other frameworks in this:

- Strands makes the spans of invocations, model calls and tools itself.
- A model call has two parts. The middleware requests a response, and can refuse or change the
  request. `sent_requests` follows what is sent for it: several requests, or none.
- A response is a turn once a hook sees it added to the conversation, as hooks may discard it.
- An invocation has legs, as a hook may resume an agent that has ended.
- Tools are refused by hooks, and run in middleware, some of them later and in another context.
"""
