"""The simulator: plays a task graph on a virtual clock."""
