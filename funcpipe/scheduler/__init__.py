"""From a plan to a task graph, and from the graph to a trace: on a virtual clock or for real."""
