"""A run from outside, by its objects in storage: status, watch, stop, clean."""
