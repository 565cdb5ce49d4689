"""The exact search: the best plan with proof, no solver needed."""

from funcpipe.partitioner.exact.search import exact

__all__ = ["exact"]
