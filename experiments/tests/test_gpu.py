"""The check of a GPU runs on the stand-in, says so, and fails where something is not as wanted."""

import contextlib
import copy
import gc
import io
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from experiments.studies import gpu, gpu_equality, gpu_memory, gpu_processes, gpu_speed
from experiments.studies.gpu_equality import HANDED_OVER, KILLED, UNDISTURBED, Run
from tests.support.stand_in import on_stand_in
from tests.support.stand_in_device import NAME

WANTED: dict[str, Any] = {
    "equality": [{"network": "mlp", "stages": 2, "replicas": 1, "fate": KILLED, "equal": True}],
    "device_memory": [{"network": "mlp", "off": 0.1}],
    "host_memory": [{"network": "mlp", "off": -0.1}],
    "one_stage": {"speed": 0.95},
    "two_stages": {"speed": 0.9},
}


@pytest.mark.parametrize(
    ("table", "changed", "said"),
    [
        ("equality", {"equal": False}, "mlp by 2 x 1, killed: other bits"),
        ("device_memory", {"off": -0.101}, "mlp on the device: -10.1%"),
        ("host_memory", {"off": 0.101}, "mlp on the host: +10.1%"),
        ("host_memory", {"off": float("nan")}, "mlp on the host: +nan%"),
        ("one_stage", {"speed": 0.949}, "one stage: 0.949 of the speed, wanted are 0.95"),
        ("two_stages", {"speed": 0.899}, "two stages: 0.899 of the speed, wanted are 0.9"),
    ],
)
def test_each_miss_is_named_and_speed_is_that_of_gpus_only(table: str, changed: dict[str, Any], said: str) -> None:
    assert gpu.misses(WANTED, speed=True) == []
    missed = copy.deepcopy(WANTED)
    (missed[table][0] if isinstance(missed[table], list) else missed[table]).update(changed)
    assert gpu.misses(missed, speed=True) == [said]
    assert gpu.misses(missed, speed=False) == ([] if "stage" in said else [said])


@pytest.mark.parametrize(("missed", "ends_with"), [([], 0), (["mlp on the host: +10.1%"], 1)])
@on_stand_in
def test_it_says_that_it_ran_on_the_stand_in_and_ends_with_1_after_a_miss(missed: list[str], ends_with: int) -> None:
    text = io.StringIO()
    with (
        mock.patch.object(gpu, "measure", return_value=WANTED),
        mock.patch.object(gpu, "misses", return_value=missed),
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(text),
    ):
        table = Path(folder, "gpu.json")
        assert gpu.main(["--json", str(table)]) == ends_with
        assert json.loads(table.read_text()) == {"device": gpu.STAND_IN, "is_real": False, **WANTED}
    assert text.getvalue().startswith("on the stand-in")
    assert all(f"missed: {miss}" in text.getvalue() for miss in missed)


def test_networks_of_ten_kinds_have_a_cut_a_kill_and_a_hand_over() -> None:
    assert len(gpu_equality.RUNS) == 10
    for runs in gpu_equality.RUNS.values():
        assert {run.fate for run in runs} == {UNDISTURBED, KILLED, HANDED_OVER}


@pytest.mark.parametrize("run", [Run(2, 1, HANDED_OVER), Run(1, 2, KILLED)])
@on_stand_in
def test_a_worker_that_is_another_function_after_a_step_has_the_bits_of_plain_training(run: Run) -> None:
    with gpu.keys_of_tests():
        found = gpu_equality.row("bag", run, NAME, micro_batch=4)
    assert found["equal"], found


@pytest.mark.long
@on_stand_in
def test_a_process_holds_of_the_host_what_is_planned() -> None:
    with gpu.keys_of_tests():
        found = gpu_memory.host_peak(gpu_memory.planned("transformer"), NAME)
    assert abs(found["off"]) <= gpu.OFF, found


@pytest.mark.long
@on_stand_in
def test_two_stages_in_processes_are_predicted_and_observed() -> None:
    with gpu.keys_of_tests():
        found = gpu_speed.two_stages(gpu_speed.STAND_IN, NAME, 1.0)
    assert found["predicted_s"] > 0
    assert found["observed_s"] > 0


@on_stand_in
def test_memory_of_the_stand_in_is_not_the_host_s() -> None:
    """Tensors of 64 MB have memory of their own; what the first such copy loads is there before, and what earlier tests
    left is gone.
    """
    warm = torch.ones(16 << 20, device=NAME).cpu()
    del warm
    gc.collect()
    before = gpu_processes.host_bytes()
    there = torch.ones(16 << 20, device=NAME)
    assert abs(gpu_processes.host_bytes() - before) < 1 << 20, there.nbytes
    here = there.cpu()
    assert abs(gpu_processes.host_bytes() - before - here.nbytes) < 1 << 20
