import pytest

from experiments.studies.launches import invoked_s
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.launch_rate import launched_after_s

SPEC = load_spec("aws-lambda")


@pytest.mark.parametrize("functions", [1, 384, 2000])
def test_a_launch_is_as_fast_as_client_and_platform_admit(functions: int) -> None:
    found = invoked_s(functions, SPEC, at_once=32, invocation_s=0.1)
    assert found == sorted(found)
    for count in (1, functions // 2 + 1, functions):
        client_s = 0.1 * -(-count // 32)
        admitted_s, _ = launched_after_s(count, SPEC)
        assert max(client_s, admitted_s + 0.1) - 1e-6 <= found[count - 1] <= client_s + admitted_s + 0.1


def test_a_client_that_is_not_in_the_way_starts_functions_at_the_rate() -> None:
    found = invoked_s(1500, SPEC, at_once=10_000, invocation_s=0.0)
    assert found == pytest.approx([launched_after_s(count, SPEC)[0] for count in range(1, 1501)])
