"""Data-parallel training around a parameter server: synchronous or asynchronous, on machines of different speeds."""
