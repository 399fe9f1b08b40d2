"""Follows and halts Strands agents.

What is private in Strands and used here, each held by `tests/test_strands_private.py`:

- `Agent._start_agent_trace_span`, `Agent._end_agent_trace_span`: begin and end of an invocation.
- `Agent._aux_model`: the model of summaries.
- `Agent._append_messages`: adds a message and tells the hooks.
- `Agent._deferred_cancel`, `Agent._checkpointing`: the loop is going to end by itself.
- `Agent._interrupt_state`: holds the answer of the human who was asked, and the results of the
  tools that were done before the question.
- `Agent.hooks`, `HookRegistry._registered_callbacks`: to be told of an event at less cost.
- `Agent._middleware_registry`, `MiddlewareRegistry.invoke`, `MiddlewareRegistry._handlers`: the
  same for its stages, next to what Strands does in them.
- `strands.middleware._agent_stream.AgentStreamStage`: the only place to change a stop reason.
- `strands.types._events`: the events that pass there.
- `strands.telemetry.metrics._total_prompt_tokens`: how Strands counts cached tokens as input.
- `strands.tools.structured_output.structured_output_tool.StructuredOutputTool`: no tool call.
"""
