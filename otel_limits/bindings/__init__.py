"""One package per agent framework: the only parts that touch an agent. `known` lists them."""
