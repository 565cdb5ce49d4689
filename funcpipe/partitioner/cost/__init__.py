"""The one cost model: seconds, bytes, dollars and requests of a plan."""
