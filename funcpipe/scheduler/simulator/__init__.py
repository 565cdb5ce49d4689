"""A task graph on a virtual clock."""
