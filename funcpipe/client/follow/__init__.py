"""A run from its launch to its result: upload, supervise, follow, collect, write back."""
