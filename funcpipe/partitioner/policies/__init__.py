"""Other policies, each a function from a problem to a plan, so that they can be set beside the best plan."""
