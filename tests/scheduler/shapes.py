"""Shapes of steps for the tests: random graphs of stages; and numbers for their tasks."""

import zlib

from hypothesis import strategies as st

from funcpipe.core import Routes, ScheduleKind, Streams, Sync, TensorProfile, TiedParameter, find_routes
from funcpipe.scheduler.graph import StepShape
from funcpipe.scheduler.pipeline import Loading


def drawn(*what: object) -> float:
    """A number from 0 to 1 that depends on `what` alone."""
    return zlib.crc32(repr(what).encode()) / 2**32


def chain_routes(stages: int, payload_bytes: int = 1000) -> Routes:
    tensors = [
        TensorProfile(
            name=f"t{i}", producer=i, consumers=(i + 1,), forward_bytes=payload_bytes, backward_bytes=payload_bytes
        )
        for i in range(stages - 1)
    ]
    return find_routes(range(stages), tensors)


@st.composite
def routes(draw: st.DrawFn, stages: int) -> Routes:
    """Any tensors between any stages, some without a gradient; parameters tied between any."""
    tensors = []
    for i in range(draw(st.integers(0, 6)) if stages > 1 else 0):
        producer = draw(st.integers(0, stages - 2))
        consumers = draw(st.sets(st.integers(producer + 1, stages - 1), min_size=1))
        size = draw(st.integers(1, 5000))
        tensors.append(
            TensorProfile(
                name=f"t{i}",
                producer=producer,
                consumers=tuple(sorted(consumers)),
                forward_bytes=size,
                backward_bytes=draw(st.sampled_from([0, size])),
            )
        )
    holders = st.sets(st.integers(0, stages - 1), min_size=2)
    ties = [
        TiedParameter(name=f"w{i}", layers=tuple(sorted(draw(holders))), parameter_bytes=draw(st.integers(1, 5000)))
        for i in range(draw(st.integers(0, 3)) if stages > 1 else 0)
    ]
    return find_routes(range(stages), tensors, ties)


@st.composite
def loadings(draw: st.DrawFn, stages: int) -> Loading | None:
    """Nothing, or what some stages load."""
    loading = draw(st.sets(st.integers(0, stages - 1)))
    if not loading:
        return None
    return Loading(stages=frozenset(loading), following=draw(st.integers(0, 9)), is_loaded=draw(st.booleans()))


@st.composite
def shapes(draw: st.DrawFn) -> StepShape:
    stages = draw(st.integers(1, 5))
    schedule = draw(st.sampled_from(ScheduleKind))
    return StepShape(
        stages=stages,
        replicas=draw(st.integers(1, 4)),
        micro_batches=draw(st.integers(1, 9)),
        routes=draw(st.just(chain_routes(stages)) | routes(stages)),
        schedule=schedule,
        sync=draw(st.sampled_from(Sync)),
        loading=draw(loadings(stages)),
        streams=draw(st.none() | st.builds(Streams, st.integers(1, 6), st.integers(1, 4), st.integers(1, 6))),
        norms=draw(st.booleans()),
        joint_loss=schedule is ScheduleKind.GPIPE and draw(st.booleans()),
        alone=draw(st.booleans()),
        meets=draw(st.booleans()),
        fragments=draw(st.sampled_from([(), (0,), (1,), (0, 1, 2)])),
        accelerated=frozenset(draw(st.sets(st.integers(0, stages - 1)))),
    )
