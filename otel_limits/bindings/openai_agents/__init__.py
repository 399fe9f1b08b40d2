"""The OpenAI Agents SDK: tracks its runs, hand-offs, model calls and function tools."""
