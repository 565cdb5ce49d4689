"""Runs whose storage is not theirs alone, whose clients sleep, whose folders cannot be written: drawn by fixed seeds.

`experiments.studies.attacks` makes many more.
"""

import pytest

from tests.support.attacks import ADVISED, REFUSED, SAME, Attack, drawn, run

ENDS = {attack: {SAME, ADVISED, REFUSED} for attack in Attack}
ENDS |= {attack: {REFUSED} for attack in (Attack.BELOW, Attack.CONDITIONS, Attack.FOLDER, Attack.KEYS)}
ENDS |= {attack: {SAME} for attack in (Attack.LATER, Attack.LOGS)}


@pytest.mark.parametrize("attack", Attack)
def test_a_run_under_attack_ends_with_the_same_bits_or_with_advice_that_works(attack: Attack) -> None:
    ending = run(0, (attack,))
    assert ending.outcome in ENDS[attack], ending


@pytest.mark.parametrize("seed", [1, 3])
def test_several_attacks_at_once(seed: int) -> None:
    ending = run(seed, drawn(seed))
    assert ending.outcome in (SAME, ADVISED, REFUSED), ending
