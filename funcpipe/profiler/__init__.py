"""Profile a layer graph: seconds, parameters, activations, and the tensors that cross between layers."""

REPEATS = 5
"""How often a layer is timed, at least."""
