"""Whatever a model is composed of, it is trained as plain PyTorch trains it, or refused before the first step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import at_most
from tests.model.graph.composed.judge import PARTS, judge, recipe


@at_most(12)
@given(seed=st.integers(0, 10**9))
def test_a_composed_model_is_equal_or_refused(seed: int) -> None:
    verdict = judge(recipe(seed), seed)
    assert verdict.kind in ("equal", "refused", "unusable"), f"seed {seed}, {verdict.recipe}: {verdict.why}"


def test_a_recipe_follows_from_its_seed_and_reaches_every_part() -> None:
    recipes = [recipe(seed) for seed in range(300)]
    assert recipes == [recipe(seed) for seed in range(300)]
    assert {name for made in recipes for name in made.parts} == {kind.__name__ for kind in PARTS}
    assert {made.replicas for made in recipes} == {1, 2}
    assert any(len(set(made.lengths)) > 1 for made in recipes)


@pytest.mark.parametrize("part", ["Part", "LayerNorm", "Dropout", "Attention", "BatchSize"])
def test_ordinary_parts_are_equal(part: str) -> None:
    """The judge does not refuse everything: what is plain is trained, and equal."""
    drawn = recipe(0)
    made = type(drawn)(parts=(part, "Part"), skips={1: 0}, tied=(0, 1), output="tuple", lengths=(5,), replicas=1)
    verdict = judge(made, 1)
    assert verdict.kind == "equal", verdict.why
