"""Profile a layer graph: seconds, parameters, activations, and the tensors that cross between layers."""

from funcpipe.profiler.profile import REPEATS, profile

__all__ = ["REPEATS", "profile"]
