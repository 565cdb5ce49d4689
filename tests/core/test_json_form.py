import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import (
    Events,
    FunctionSize,
    Plan,
    PlatformSpec,
    ScheduleKind,
    Stage,
    StepReport,
    Sync,
    TensorProfile,
    TrainingSpec,
    Wire,
    from_text,
    read,
    to_text,
    write,
)
from funcpipe.errors import FormatError, InvalidValue
from tests.core.values import plans, platforms, profiles, training_specs


@given(st.one_of(profiles(), platforms(), plans(), training_specs))
def test_every_value_reads_back_as_it_was_written(value: Any) -> None:
    found = from_text(type(value), to_text(value), source="x.json")
    assert (found, hash(found)) == (value, hash(value))


def example() -> Plan:
    return Plan(
        global_batch=64,
        micro_batch=4,
        replicas=2,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        stages=(
            Stage(first=0, stop=7, size="4096MB", memory_mb=4096),
            Stage(first=7, stop=26, size="2048MB", memory_mb=2048),
        ),
    )


def document() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(to_text(example()))
    return data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"format": "funcpipe.plan/9"},
            "plan.json: field 'format' is 'funcpipe.plan/9', but this funcpipe reads version 1",
        ),
        (
            {"format": "funcpipe.profile/1"},
            "plan.json: field 'format' is 'funcpipe.profile/1', expected 'funcpipe.plan/1'",
        ),
        ({"format": None}, "plan.json: field 'format' is missing"),
        ({"replicas": "2"}, "plan.json: field 'replicas' must be an integer, got \"2\""),
        ({"replicas": True}, "plan.json: field 'replicas' must be an integer, got true"),
        ({"replicas": 0}, "plan.json: field 'replicas' must be a whole number of at least 1, got 0"),
        (
            {"replicas": 3},
            "plan.json: field 'global_batch' must be a multiple of micro_batch x replicas = 4 x 3, got 64",
        ),
        ({"wire": "fp8"}, "plan.json: field 'wire' must be one of 'fp32', 'bf16', 'fp16', 'int8', got 'fp8'"),
        ({"stages": []}, "plan.json: field 'stages' must not be empty"),
        ({"stages": {}}, "plan.json: field 'stages' must be an array, got {}"),
        (
            {"stages": [{"first": 0, "stop": 0, "size": "a", "memory_mb": 1}]},
            "field 'stages[0].stop' must be a whole number of at least 1",
        ),
        ({"stages": [{"first": 0, "stop": 2, "memory_mb": 1}]}, "field 'stages[0].size' is missing"),
        ({"stages": [{"first": 1, "stop": 2, "size": "a", "memory_mb": 1}]}, "field 'stages[0].first' must be 0"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError) as error:
        from_text(Plan, json.dumps(document() | change), source="plan.json")
    assert message in str(error.value)


@pytest.mark.parametrize("field", ["global_batch", "micro_batch", "replicas", "schedule", "sync", "wire", "stages"])
def test_a_missing_field_is_named(field: str) -> None:
    data = document()
    del data[field]
    with pytest.raises(FormatError, match=f"plan.json: field '{field}' is missing"):
        from_text(Plan, json.dumps(data), source="plan.json")


def test_an_unknown_field_is_ignored_with_a_warning_that_names_its_neighbour() -> None:
    with pytest.warns(UserWarning, match="unknown field 'replica' is ignored; did you mean 'replicas'"):
        assert from_text(Plan, json.dumps(document() | {"replica": 2}), source="plan.json") == example()


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "NaN", '{"format": "funcpipe.plan/1"', "[" * 100_000])
def test_text_that_is_no_document_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match=r"x\.json"):
        from_text(Plan, text, source="x.json")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "1" + "0" * 400, "true", '"1"', "null"])
def test_a_number_must_be_finite(number: str) -> None:
    data = to_text(replace_latency(0.5)).replace('"latency_s": 0.5', f'"latency_s": {number}')
    with pytest.raises(FormatError, match="field 'latency_s' must be a finite number"):
        from_text(PlatformSpec, data, source="x.json")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_no_number_is_written_and_read_like_any_other(number: float) -> None:
    text = to_text(StepReport(step=3, samples=8, loss_sum=number))
    json.loads(text, parse_constant=pytest.fail)  # what other programs would not read
    assert str(from_text(StepReport, text, source="x.json").loss_sum) == str(number)


def replace_latency(latency_s: float) -> PlatformSpec:
    size = FunctionSize(name="1MB", memory_mb=1, vcpu=1.0, upload_bytes_s=1.0, download_bytes_s=1.0, price_usd_s=0.0)
    return PlatformSpec(
        name="p",
        region="r",
        as_of="2026-11",
        source="s",
        sizes=(size,),
        latency_s=latency_s,
        contention=1.0,
        shared_bytes_s=None,
        price_put_usd=0.0,
        price_get_usd=0.0,
        price_invocation_usd=0.0,
        lifetime_s=None,
        cold_start_s=0.0,
        max_functions=1,
        max_payload_bytes=1,
    )


def test_numbers_that_are_keys_are_numbers_again() -> None:
    text = to_text(Events(events=(), samples={3: 8, 12: 2}))
    assert json.loads(text)["samples"] == {"3": 8, "12": 2}
    assert from_text(Events, text, source="f").samples == {3: 8, 12: 2}
    with pytest.raises(FormatError, match=r"f: the keys of field 'samples' must be integers, got '1.5'"):
        from_text(Events, text.replace('"3"', '"1.5"'), source="f")


def test_values_check_themselves() -> None:
    spec = replace_latency(0.1)
    with pytest.raises(InvalidValue, match="latency_s must be at least 0, got -1"):
        replace(spec, latency_s=-1.0)
    with pytest.raises(InvalidValue, match="sizes must be in ascending order of memory_mb"):
        replace(spec, sizes=(replace(spec.sizes[0], name="b", memory_mb=2), spec.sizes[0]))
    with pytest.raises(InvalidValue, match="must be one of 1MB, got 'z'"):
        spec.size("z")
    with pytest.raises(InvalidValue, match=r"consumers\[0\] must come after the producer 1 \(no cycles\), got 1"):
        TensorProfile(name="t", producer=1, consumers=(1,), forward_bytes=0, backward_bytes=0)
    with pytest.raises(InvalidValue, match="budget_usd cannot be given together with deadline_s"):
        TrainingSpec(global_batch=4, deadline_s=1.0, budget_usd=1.0)


def test_files_are_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write(example(), path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(Plan, path) == example()
    with pytest.raises(FormatError, match=r"nowhere.json: cannot be read: there is no such file; a plan is written by"):
        read(Plan, tmp_path / "nowhere.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="binary: cannot be read"):
        read(Plan, tmp_path / "binary")
