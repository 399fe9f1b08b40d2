"""One module per agent framework: the only parts that touch an agent."""
