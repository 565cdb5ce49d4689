"""From a plan to a task graph, and from the graph to a trace: simulated or executed."""

from funcpipe.core.distribution import require_full_name

require_full_name(__name__)
