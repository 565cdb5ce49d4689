"""What `from funcpipe import …` gives: these names and no others."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import funcpipe

SOURCE = ast.parse(Path(funcpipe.__file__).read_text())

NAMES = """
FuncPipe RunResult Progress Verification status stop clean export RunStatus Verdict WorkerStatus WorkerState
TrainingSpec Pins Plan Stage Estimate ModelProfile PlatformSpec FunctionSize Trace Bill
Bucket Disturbances JobEstimate RunInfo Callback EachStep EMA SWA Teacher Sweep Candidate
FaultTolerance RunLimits RunSettings Validation ValidationReport Numerics OnDrift OnNan OnOutOfMemory
Precision Wire Sync ScheduleKind Recompute OptimizerKind
Outcome WorkerReport read write load_spec
JobSpec InverseLoss WeightedLoss Market Provision ProvisionTable load_market provision_table
ServerCluster ServerFunctions ServerResult ServerWorker Replanner SpotPlan
Site open_site open_storage open_platform open_deployment
FuncPipeError InputError DataError ModelError PlanError Infeasible RunError RunHalted RunInterrupted WorkerFailed
"""


def imported_for_type_checkers() -> set[str]:
    (block,) = [node for node in SOURCE.body if isinstance(node, ast.If)]
    return {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_the_public_names_are_these() -> None:
    assert len(funcpipe.__all__) == len(set(funcpipe.__all__)) <= 82
    assert set(funcpipe.__all__) == set(NAMES.split())


def test_every_public_name_can_be_imported_and_is_documented() -> None:
    values = {name: getattr(funcpipe, name) for name in funcpipe.__all__}
    assert [name for name, value in values.items() if value.__name__ != name] == []
    assert [name for name, value in values.items() if not inspect.getdoc(value)] == []
    assert set(values) - set(dir(funcpipe)) == set()


def test_type_checkers_see_what_is_loaded_late() -> None:
    assert imported_for_type_checkers() == set(funcpipe._LAZY)


def test_a_name_that_is_not_there_is_told() -> None:
    with pytest.raises(AttributeError, match="module 'funcpipe' has no attribute 'Funcpipe'"):
        _ = funcpipe.Funcpipe


@pytest.mark.parametrize(
    ("name", "module"),
    [("StorageBusy", "funcpipe.errors"), ("Interval", "funcpipe.core"), ("Storage", "funcpipe.platforms.base")],
)
def test_names_that_fewer_users_need_are_found_by_the_error(name: str, module: str) -> None:
    with pytest.raises(AttributeError, match=f"'{name}'; it is in {module}: from {module} import {name}"):
        getattr(funcpipe, name)


def test_values_errors_and_protocols_load_neither_torch_nor_numpy() -> None:
    code = "import sys; from funcpipe import Plan, FaultTolerance, PlanError, read; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy"} & set(loaded)
