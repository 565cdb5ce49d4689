import pytest

from experiments.studies.many_replicas import WAYS, Setting, executed


@pytest.mark.parametrize("tells", [True, False])
def test_replicas_sum_exactly_with_requests_refused_and_without(tells: bool) -> None:
    """`executed` compares each sum."""
    setting = Setting(
        way=WAYS["tree-4"], replicas=5, elements=40, latency_s=0.001, requests_s=400.0, steps=3, tells=tells
    )
    seconds, storage, _ = executed(setting)
    assert len(seconds) == 3
    puts, gets = 3 * 4 * 5, 3 * 4 * (4 + 4)
    served = sum(storage.served.values())
    assert served == puts + gets if tells else served >= puts + gets
