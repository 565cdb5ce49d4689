"""Tasks and lanes, what a schedule is made of, and the rule of when a task may start (`Order`).

A task prints as a short, exact text such as `get-activation.s2.r0.m3.p0.k1`, which can be parsed back. Traces, logs and
storage keys use that text.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from funcpipe.core import Resource
from funcpipe.core.choices import OPEN_UPLOADS, open_downloads
from funcpipe.errors import InvalidValue


class Kind(Enum):
    """The action of a task."""

    LOAD = "load"
    FORWARD = "forward"
    BACKWARD = "backward"
    BUCKET = "bucket"
    PUT_OUTPUTS = "put-outputs"
    GET_OUTPUTS = "get-outputs"
    JOINT_LOSS = "joint-loss"
    PUT_ACTIVATION = "put-activation"
    GET_ACTIVATION = "get-activation"
    PUT_GRADIENT = "put-gradient"
    GET_GRADIENT = "get-gradient"
    ACTIVATION_TO_HOST = "activation-to-host"
    ACTIVATION_TO_DEVICE = "activation-to-device"
    GRADIENT_TO_HOST = "gradient-to-host"
    GRADIENT_TO_DEVICE = "gradient-to-device"
    GET_TIED = "get-tied"
    ADD_TIED = "add-tied"
    PUT_TIED = "put-tied"
    LOCAL_UPDATE = "local-update"
    FLATTEN = "flatten"
    PUT_SPLIT = "put-split"
    GET_SPLIT = "get-split"
    MERGE = "merge"
    PUT_MERGED = "put-merged"
    GET_MERGED = "get-merged"
    PUT_TIED_SUM = "put-tied-sum"
    GET_TIED_SUM = "get-tied-sum"
    NORM = "norm"
    PUT_NORM = "put-norm"
    GET_NORM = "get-norm"
    UPDATE = "update"
    PUT_SCORES = "put-scores"
    GET_SCORES = "get-scores"

    __hash__ = object.__hash__  # members are unique objects; Enum's own hash, in Python, dominates large graphs

    @property
    def is_put(self) -> bool:
        """True if it writes an object."""
        return self.value.startswith("put-")

    @property
    def is_get(self) -> bool:
        """True if it reads an object."""
        return self.value.startswith("get-")

    @property
    def resource(self) -> Resource:
        """The lane that tasks of this kind run on."""
        if self.is_put:
            return Resource.UPLOAD
        if self is Kind.MERGE:
            return Resource.MERGE
        if self is Kind.LOAD:
            return Resource.LOAD
        if self in (Kind.ACTIVATION_TO_HOST, Kind.GRADIENT_TO_HOST):
            return Resource.TO_HOST
        if self in (Kind.ACTIVATION_TO_DEVICE, Kind.GRADIENT_TO_DEVICE):
            return Resource.TO_DEVICE
        return Resource.DOWNLOAD if self.is_get else Resource.COMPUTE


@dataclass(frozen=True, slots=True)
class Lane:
    """One of the things that a worker does at the same time as the others: compute, upload, download, merge, load, and
    on an accelerator copy to the host and to the device.
    """

    stage: int
    replica: int
    resource: Resource


class Task(NamedTuple):
    """One piece of work of one worker; a tuple, because large graphs make and look up hundreds of thousands.

    `micro_batch` counts over all replicas. `peer` is the other stage of a transfer between stages, or the other replica
    of a synchronisation or of an exchange of outputs. `part` numbers the objects that a stage writes for one
    micro-batch, the objects or rounds of a synchronisation, or the routes of tied parameters; it is 1 in a load for the
    next step. A *bucket* is the part of a worker's last backward that completes the gradients of one round of the
    synchronisation; the rest of that backward gets the number after the last bucket. `fragment` is the one that is
    synchronised, where parameters are in several; and `delay` the number of steps in which it is, if it goes on beside
    those steps.
    """

    kind: Kind
    stage: int
    replica: int
    micro_batch: int | None = None
    peer: int | None = None
    part: int | None = None
    fragment: int | None = None
    delay: int | None = None

    @property
    def lane(self) -> Lane:
        """The lane that it runs on."""
        return Lane(self.stage, self.replica, self.kind.resource)

    def __str__(self) -> str:
        text = f"{self.kind.value}.s{self.stage}.r{self.replica}"
        for letter, number in zip("mpkfd", self[3:], strict=True):
            if number is not None:
                text += f".{letter}{number}"
        return text

    @staticmethod
    def parse(text: str) -> "Task":
        """Return the task that prints as `text`; raises InvalidValue for any other text."""
        match = _TASK.fullmatch(text)
        if match is None or match["kind"] not in _KINDS:
            raise InvalidValue("task", text, "must read like 'forward.s0.r1.m3'")
        numbers = {
            name: int(value) for name, value in match.groupdict().items() if name != "kind" and value is not None
        }
        return Task(_KINDS[match["kind"]], **numbers)


PUTS = frozenset(kind for kind in Kind if kind.is_put)
GETS = frozenset(kind for kind in Kind if kind.is_get)
RESOURCES = {kind: kind.resource for kind in Kind}

_KINDS = {kind.value: kind for kind in Kind}
_TASK = re.compile(
    r"(?P<kind>[a-z-]+)\.s(?P<stage>\d+)\.r(?P<replica>\d+)"
    r"(\.m(?P<micro_batch>\d+))?(\.p(?P<peer>\d+))?(\.k(?P<part>\d+))?(\.f(?P<fragment>\d+))?"
    r"(\.d(?P<delay>\d+))?",
    re.ASCII,
)


_COPIES = {
    Kind.PUT_ACTIVATION: Kind.ACTIVATION_TO_HOST,
    Kind.GET_ACTIVATION: Kind.ACTIVATION_TO_DEVICE,
    Kind.PUT_GRADIENT: Kind.GRADIENT_TO_HOST,
    Kind.GET_GRADIENT: Kind.GRADIENT_TO_DEVICE,
}


def copy_of(transfer: Task) -> Task:
    """Return the copy between host and accelerator of the message that `transfer`, between stages, puts or gets."""
    return transfer._replace(kind=_COPIES[transfer.kind])


def source_of(get: Task) -> Task:
    """Return the put that writes the object which `get` reads."""
    assert get.peer is not None, f"{get} has no peer to read from"
    match get.kind:
        case Kind.GET_ACTIVATION:
            return Task(Kind.PUT_ACTIVATION, get.peer, get.replica, micro_batch=get.micro_batch, part=get.part)
        case Kind.GET_GRADIENT:
            return Task(Kind.PUT_GRADIENT, get.peer, get.replica, micro_batch=get.micro_batch, peer=get.stage)
        case Kind.GET_OUTPUTS:
            return Task(Kind.PUT_OUTPUTS, get.stage, get.peer)
        case Kind.GET_TIED:
            return Task(Kind.PUT_TIED, get.peer, get.replica, peer=get.stage, part=get.part)
        case Kind.GET_TIED_SUM:
            return get._replace(kind=Kind.PUT_TIED_SUM, stage=get.peer, peer=None)
        case Kind.GET_NORM:
            return Task(Kind.PUT_NORM, get.peer, get.replica)
        case Kind.GET_SCORES:
            return Task(Kind.PUT_SCORES, get.peer, get.replica, part=get.part)
        case Kind.GET_SPLIT:
            return get._replace(kind=Kind.PUT_SPLIT, replica=get.peer, peer=None)
        case Kind.GET_MERGED:
            return get._replace(kind=Kind.PUT_MERGED, replica=get.peer, peer=None)
        case _:
            raise InvalidValue("task", str(get), "must be a get")


class Order(Enum):
    """The order of a lane: the only statement of when a task may start, read by graph, executor and simulator.

    A task may start once everything it needs has ended and its lane lets it. A lane serves one task at a time:

    =========  ======================================================  =====================================
    lane       which task is next                                      it has the lane
    =========  ======================================================  =====================================
    compute    the next in the graph's order                           from its start to its end
    merge      the next in the graph's order                           from its start to its end
    load       the next in the graph's order                           from its start to its end
    to-host    the next in the graph's order                           from its start to its end
    to-device  the next in the graph's order                           from its start to its end
    upload     the first in the graph's order of those that may start  as below
    download   the first in the graph's order whose object is there    as below
    =========  ======================================================  =====================================

    Copies cannot deadlock in the graph's order: what makes or needs them computes in that order anyway.

    Requests are not bodies. The requests of `SIDE_BY_SIDE` transfers are open at the same time, and each has its lane
    only while its bytes move. Any other transfer has its lane for its latency too, as in the cost model. There the
    executor does better than planned: it opens several requests of either sort, and lets one body at a time through a
    `comm.transfer_gate`.

    A worker cannot see which objects are there: it has to ask. It asks in the graph's order. So that the simulator
    plays the same, `build_graph` lets each get need what the gets before it on its lane need of their own worker.

    Only so many requests are open at once as `open_requests` says: a put from when it may start, a get from when its
    turn has come to ask, to its end. That cannot deadlock, because the earliest get never waits for a later one.

    For example, let a lane hold a, b, c in this order, each taking 1 s once what it needs has ended, at 0 s, 3 s and
    1 s: on the compute lane they run at 0, 3 and 4 s; on the upload lane c overtakes b, and they run at 0, 3 and 1 s.
    """

    STRICT = "each task waits until the task before it has ended"
    ASKED = "requests are opened in order, objects are read as they arrive"
    OVERTAKING = "a task that may start overtakes those that may not"


ORDERS: Mapping[Resource, Order] = {
    Resource.COMPUTE: Order.STRICT,
    Resource.MERGE: Order.STRICT,
    Resource.LOAD: Order.STRICT,
    Resource.TO_HOST: Order.STRICT,
    Resource.TO_DEVICE: Order.STRICT,
    Resource.UPLOAD: Order.OVERTAKING,
    Resource.DOWNLOAD: Order.ASKED,
}
"""The order of each lane."""


def open_requests(replicas: int) -> Mapping[Resource, int]:
    """Return how many requests a function of a stage with so many replicas has open at once, in each direction."""
    return {Resource.UPLOAD: OPEN_UPLOADS, Resource.DOWNLOAD: open_downloads(replicas)}


SIDE_BY_SIDE = frozenset(
    {Kind.PUT_SPLIT, Kind.GET_SPLIT, Kind.PUT_MERGED, Kind.GET_MERGED, Kind.PUT_OUTPUTS, Kind.GET_OUTPUTS}
)
"""The transfers between the replicas of a stage: their requests wait for their latency side by side."""
