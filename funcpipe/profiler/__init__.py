"""A layer graph is measured on this machine: seconds, parameters, activations, and the tensors that cross."""

from funcpipe.profiler.profile import REPEATS, profile

__all__ = ["REPEATS", "profile"]
