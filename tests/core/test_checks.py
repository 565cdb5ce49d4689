"""Checks of fields, and choices that are given as strings."""

import math
from dataclasses import replace
from typing import Any

import pytest

from funcpipe.core import (
    FaultTolerance,
    Numerics,
    OnDrift,
    OnOutOfMemory,
    OptimizerKind,
    Recompute,
    ScheduleKind,
    Sync,
    TrainingSpec,
    Wire,
    checks,
    from_text,
    to_text,
)
from funcpipe.core.settings import RunKeywords, RunSettings, settings_with
from funcpipe.errors import FormatError, InvalidValue
from tests.e2e.small import plan


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "1", None, True])
def test_a_positive_number_is_one(value: Any) -> None:
    with pytest.raises(InvalidValue, match=r"x must be above 0, got"):
        checks.positive("x", value)


@pytest.mark.parametrize("value", [0, -1, 1.5, "1", None, True])
def test_a_whole_number_is_one(value: Any) -> None:
    with pytest.raises(InvalidValue, match=r"x must be a whole number of at least 1, got"):
        checks.whole("x", value, 1)


def test_choices_may_be_strings() -> None:
    given: dict[str, Any] = {
        "optimizer": "adam",
        "wire": "bf16",
        "wire_back": "fp32",
        "wire_sync": "bf16",
        "numerics": "bf16",
        "recompute": "never",
        "schedule": "1f1b",
        "sync": "streamed",
    }
    expected = TrainingSpec(
        global_batch=8,
        optimizer=OptimizerKind.ADAM,
        wire=Wire.BF16,
        wire_back=Wire.FP32,
        wire_sync=Wire.BF16,
        numerics=Numerics.BF16,
        recompute=Recompute.NEVER,
        schedule=ScheduleKind.ONE_F_ONE_B,
        sync=Sync.STREAMED,
    )
    assert TrainingSpec(global_batch=8, **given) == expected
    faults: dict[str, Any] = {"on_oom": "grow", "on_drift": "fail"}
    assert FaultTolerance(**faults) == FaultTolerance(on_oom=OnOutOfMemory.GROW, on_drift=OnDrift.FAIL)


CHOICES = ["optimizer", "wire", "wire_back", "wire_sync", "numerics", "recompute", "schedule", "sync"]


@pytest.mark.parametrize("field", CHOICES)
def test_a_choice_that_there_is_not_is_told_with_those_that_there_are(field: str) -> None:
    given: dict[str, Any] = {field: "bf61"}
    with pytest.raises(InvalidValue, match=rf"{field} must be one of .*, got 'bf61'"):
        TrainingSpec(global_batch=8, **given)


def test_gradients_are_not_summed_in_a_format_that_loses_small_ones() -> None:
    with pytest.raises(InvalidValue, match="wire_sync must be one of fp32, bf16, int8, got 'fp16'"):
        TrainingSpec(global_batch=8, wire_sync=Wire.FP16)
    with pytest.raises(InvalidValue, match="wire_sync must be one of fp32, bf16, int8, got 'fp16'"):
        replace(plan(), wire_sync=Wire.FP16)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"sync_every": 0}, "sync_every must be a whole number of at least 1, got 0"),
        ({"sync_every": "never"}, "sync_every must be a whole number of at least 1, or one of end, auto, got 'never'"),
        ({"sync_every": "auto"}, "sync_every_at_most must be given with sync_every='auto', and with that alone"),
        ({"sync_every": 4, "sync_every_at_most": 8}, "sync_every_at_most must be given with sync_every='auto'"),
        ({"outer_lr": 0.7}, "outer_lr must be 1 with sync_every=1"),
        ({"outer_momentum": 0.9}, "outer_momentum must be 0 with sync_every=1"),
        ({"sync_fragments": 2}, "sync_fragments must be 1 with sync_every=1"),
        ({"sync_every": 4, "sync_fragments": 0}, "sync_fragments must be a whole number of at least 1, got 0"),
        ({"sync_every": 4, "sync_fragments": 5}, "sync_fragments must be at most 4, the steps of a round"),
        ({"sync_every": "end", "sync_fragments": 2}, "sync_fragments must be 1 with sync_every='end': all would meet"),
        (
            {"sync_every": "auto", "sync_every_at_most": 8, "sync_fragments": 9},
            "sync_fragments must be at most 8, the steps of a round",
        ),
        ({"sync_delay": 1}, "sync_delay must be 0 with sync_every=1"),
        ({"sync_every": 4, "sync_delay": -1}, "sync_delay must be a whole number of at least 0, got -1"),
        (
            {"sync_every": 4, "sync_fragments": 2, "sync_delay": 2},
            "sync_delay must be less than the steps between meetings, 4 / 2, so that they do not overlap, got 2",
        ),
        ({"sync_every": "end", "sync_delay": 1}, "sync_delay must be 0 with sync_every='end': no step follows"),
        ({"sync_every": 4, "sync_delay": 1, "shard_optimizer": True}, "sync_delay must be 0 with shard_optimizer"),
        ({"sync_every": 4, "outer_lr": 0.0}, "outer_lr must be above 0"),
        ({"sync_every": 4, "outer_momentum": -0.1}, "outer_momentum must be at least 0"),
        ({"sync_every": "end", "joint_loss": True}, "sync_every must be 1 with a loss of whole global batches"),
        ({"sync_every": 4, "averaged": True}, "sync_every must be 1 with an average"),
        ({"sync_every": 4, "wire": "fp16"}, "wire_back must be fp32, bf16 or int8 with local steps"),
        ({"sync_every": 4, "shard_optimizer": True, "wire_sync": "bf16"}, "wire_sync must be fp32 with local steps"),
    ],
)
def test_replicas_that_train_alone_are_told_how_they_may(given: dict[str, Any], rule: str) -> None:
    with pytest.raises(InvalidValue, match=rule):
        TrainingSpec(global_batch=8, **given)


def test_only_several_replicas_of_a_plan_train_alone() -> None:
    both = replace(plan(), sync_every=4, replicas=2)
    assert both.trains_locally
    assert TrainingSpec(global_batch=8, sync_every="end").trains_locally
    for other in (replace(both, replicas=1), plan(), TrainingSpec(global_batch=8)):
        assert not other.trains_locally
    with pytest.raises(
        InvalidValue, match="sync_every must be a whole number of at least 1, or one of end, got 'auto'"
    ):
        replace(both, sync_every="auto")


def test_documents_without_local_steps_are_those_of_older_versions() -> None:
    wanted = TrainingSpec(global_batch=8)
    made = replace(plan(), made_for=wanted)
    assert "sync_every" not in to_text(made)
    assert "outer" not in to_text(made)
    local = replace(made, replicas=2, sync_every="end", outer_lr=0.7, made_for=replace(wanted, sync_every=8))
    assert from_text(type(made), to_text(local), source="plan.json") == local
    with pytest.raises(FormatError, match=r"field 'sync_every' must be an integer or a string, got 1\.5"):
        from_text(type(made), to_text(local).replace('"end"', "1.5"), source="plan.json")


def test_plans_older_than_16_bit_sums_are_read() -> None:
    made = replace(plan(), made_for=TrainingSpec(global_batch=8))
    old = to_text(made).replace('"wire_sync": "fp32",', "").replace('"numerics": "exact",', "")
    assert old.count("wire_sync") == old.count("numerics") == 0
    assert from_text(type(made), old, source="plan.json") == made


def test_a_plan_remembers_what_it_was_made_for_and_older_plans_are_read() -> None:
    made_for = TrainingSpec(global_batch=8, time_value=3.84, schedule=ScheduleKind.GPIPE)
    made = replace(plan(), made_for=made_for)
    assert from_text(type(made), to_text(made), source="plan.json") == made
    old = to_text(plan()).replace('"made_for": null', '"unused": null').replace('"parameter_bytes": null,', "")
    with pytest.warns(UserWarning, match="unused"):
        assert from_text(type(made), old, source="plan.json").made_for is None


def test_settings_are_given_by_keyword() -> None:
    keywords: RunKeywords = {"run": "a", "storage": "file:///b"}
    assert settings_with(RunSettings(), keywords) == RunSettings(name="a", storage="file:///b")
