"""The rule of when a task may start: its only statement, read by the graph, the executor and the simulator.

A task may start once everything it needs has ended and its lane lets it. A lane serves one task at a time:

========  ======================================================  =====================================
lane      which task is next                                      it has the lane
========  ======================================================  =====================================
compute   the next in the graph's order                           from its start to its end
merge     the next in the graph's order                           from its start to its end
load      the next in the graph's order                           from its start to its end
upload    the first in the graph's order of those that may start  as below
download  the first in the graph's order whose object is there    as below
========  ======================================================  =====================================

Requests are not bodies. The requests of `SIDE_BY_SIDE` transfers are open at the same time, and each has its lane only
while its bytes move. Any other transfer has its lane for its latency too, as in the cost model. There the executor does
better than planned: it opens several requests of either sort, and lets one body at a time through a
`comm.transfer_gate`.

A worker cannot see which objects are there: it has to ask. It asks in the graph's order, and may limit how many
requests it has open. That cannot deadlock, because the earliest of them never waits for a later one. So that the
simulator plays the same, `build_graph` lets each get need what the gets before it on its lane need of their own worker.

For example, let a lane hold a, b, c in this order, each taking 1 s once what it needs has ended, at 0 s, 3 s and 1 s:
on the compute lane they run at 0, 3 and 4 s; on the upload lane c overtakes b, and they run at 0, 3 and 1 s.
"""

from collections.abc import Mapping
from enum import Enum

from funcpipe.core import Resource
from funcpipe.scheduler.tasks import Kind


class Order(Enum):
    """The degree to which a lane keeps to the order of the graph."""

    STRICT = "each task waits until the task before it has ended"
    ASKED = "requests are opened in order, objects are read as they arrive"
    OVERTAKING = "a task that may start overtakes those that may not"


ORDERS: Mapping[Resource, Order] = {
    Resource.COMPUTE: Order.STRICT,
    Resource.MERGE: Order.STRICT,
    Resource.LOAD: Order.STRICT,
    Resource.UPLOAD: Order.OVERTAKING,
    Resource.DOWNLOAD: Order.ASKED,
}
"""The order of each lane."""

SIDE_BY_SIDE = frozenset(
    {Kind.PUT_SPLIT, Kind.GET_SPLIT, Kind.PUT_MERGED, Kind.GET_MERGED, Kind.PUT_OUTPUTS, Kind.GET_OUTPUTS}
)
"""The transfers between the replicas of a stage: their requests wait for their latency side by side."""
