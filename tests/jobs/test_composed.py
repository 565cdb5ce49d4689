"""Whatever lies around a model: a job is equal to plain PyTorch, or refused before anything starts."""

from hypothesis import given
from hypothesis import strategies as st

from tests.examples import at_most
from tests.jobs.composed import HOOKS, LOSSES, MODES, NORMS, OPTIMIZERS, Job, outcome


def mostly(ordinary: str, all_kinds: object) -> st.SearchStrategy[str]:
    """An ordinary part, or any."""
    return st.just(ordinary) | st.sampled_from(sorted(all_kinds))  # type: ignore[call-overload]


jobs = st.builds(
    Job,
    loss=mostly("mean", LOSSES),
    optimizer=mostly("momentum", OPTIMIZERS),
    hook=mostly("none", HOOKS),
    norm=mostly("none", NORMS),
    mode=mostly("as made", MODES),
    stages=st.integers(1, 4),
    replicas=st.sampled_from([1, 1, 2]),
    micro_batch=st.sampled_from([2, 4, 8]),
    samples=st.sampled_from([32, 40, 45]),
    epochs=st.sampled_from([1, 2]),
    recompute=st.booleans(),
)


@at_most(20)
@given(jobs)
def test_a_composed_job_is_equal_or_refused(job: Job) -> None:
    outcome(job)
