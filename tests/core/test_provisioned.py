"""What functions cost that are kept ready, against a bill that is made second by second."""

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core.provisioned import SPREAD, ProvisionedTerms, first_life, spare_functions
from funcpipe.core.settings import overlap_s
from funcpipe.platforms.catalog import load_spec

LAMBDA = ProvisionedTerms(ready=0.25, used=0.58333, period_s=300.0, ready_s=180.0)


def most_at_once(functions: int, *, run_s: int, life_s: int, beside_s: int) -> int:
    """The most functions at once in a run of `run_s`, each of which is followed by another before its life ends."""
    spans = []
    for position in range(functions):
        begins, ends = 0.0, first_life(position, functions) * life_s
        while ends < run_s:
            spans.append((begins, ends))
            begins, ends = ends - beside_s, ends - beside_s + life_s
        spans.append((begins, float(run_s)))
    moments = sorted(begins for begins, _ in spans)
    return max(sum(begins <= moment < ends for begins, ends in spans) for moment in moments)


@given(st.integers(1, 40), st.integers(1, 5000), st.integers(200, 900), st.integers(1, 60))
def test_successors_find_functions_that_are_ready(functions: int, run_s: int, life_s: int, beside_s: int) -> None:
    spare = spare_functions(functions, run_s=run_s, life_s=life_s, beside_s=beside_s)
    assert most_at_once(functions, run_s=run_s, life_s=life_s, beside_s=beside_s) <= functions + spare <= 2 * functions


def test_functions_that_live_as_long_as_the_run_need_no_spare_ones() -> None:
    assert spare_functions(8, run_s=10_000, life_s=None, beside_s=10) == 0
    assert spare_functions(8, run_s=(1 - SPREAD) * 900, life_s=900, beside_s=10) == 0
    assert spare_functions(8, run_s=900, life_s=900, beside_s=10) == 1
    assert spare_functions(8, run_s=900, life_s=900, beside_s=57) == 2


@given(st.integers(1, 20_000), st.integers(0, 4))
def test_the_share_is_that_of_a_bill_by_the_second(run_s: int, spare: int) -> None:
    kept_s = next(seconds for seconds in range(0, 30_000, 300) if seconds >= 180 + run_s)
    usd_gb_s, used, ready = 1.66667e-5, 9.7222e-6, 4.1667e-6  # aws.amazon.com/lambda/pricing, 2026-11
    bill = 4 * run_s * used + (4 + spare) * kept_s * ready
    assert LAMBDA.share(run_s, spare=spare / 4) == pytest.approx(bill / (4 * run_s * usd_gb_s), rel=1e-4)


def test_the_table_of_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "platforms.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\d\.\d\d .*) \|$", page, re.MULTILINE)
    beside_s = overlap_s(5.0, 4.0)
    for functions, shares in rows:
        count = int(functions)
        for run_s, share in zip((300, 420, 600, 720, 900, 3600, 86_400), shares.split(" | "), strict=True):
            spare = spare_functions(count, run_s=run_s, life_s=900.0, beside_s=beside_s)
            assert f"{LAMBDA.share(run_s, spare=spare / count):.2f}" == share
    assert [int(functions) for functions, _ in rows] == [1, 4, 16, 64]
    assert load_spec("aws-lambda").provisioned == LAMBDA


def test_what_is_kept_is_released_a_while_after_the_expected_end() -> None:
    assert LAMBDA.released_after_s(3600.0) == pytest.approx(180 + 1.25 * 3600)
    assert math.isclose(LAMBDA.share(3600.0, spare=0.125), 0.58333 + 0.25 * 1.125 * 3900 / 3600)
