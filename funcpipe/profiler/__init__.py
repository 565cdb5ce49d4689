"""Profile a layer graph: seconds, parameters, activations, and the tensors that cross between layers."""

REPEATS = 5
"""The least number of times that a layer is timed."""
