"""Profile a layer graph: seconds, parameters, activations, and the tensors that cross between layers."""

from funcpipe.profiler.buckets import Bucket, buckets_of, combined, described
from funcpipe.profiler.profile import REPEATS, profile

__all__ = ["REPEATS", "Bucket", "buckets_of", "combined", "described", "profile"]
