"""Programs of agents as data, built with each framework, and the outcomes that limits allow."""
