"""Agent frameworks: the only room that touches an agent.

In: calls of the public methods of a framework, and its hooks.
Out: for each model call the question whether it may be sent, its usage afterwards, and a halted
agent with a valid history.
May touch: the agent with its messages and spans, and the modules `strands`, `langchain_core`,
`langgraph`, `agents` and `openai`.

All frameworks share one path: `invocation` begins and ends an invocation, `model_call` sends a
request that `admission` admits, and `tool_call` runs a tool. `framework` is the protocol of a
framework, and each has a package: `strands`, `langchain` and `openai_agents`. `known` lists them,
and `third_party` finds those of other distributions.
"""
