"""The policy file: limits, actions, prices and exemptions by agent, model and tool."""
