"""Who may import whom: walks the imports of every module."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "funcpipe"
MODULES = sorted(PACKAGE.rglob("*.py"))

WITH_TORCH = {
    "actions",
    "adapters",
    "api",
    "cli",
    "comm",
    "computation",
    "data",
    "gradients",
    "graph",
    "job",
    "launch",
    "life",
    "norms",
}
WITH_TORCH |= {
    "place",
    "probe",
    "profiler",
    "results",
    "rng",
    "sharding",
    "split",
    "stage_job",
    "statistics",
    "synchronisation",
    "ties",
    "upload",
    "verify",
    "worker",
}
"""Parts that may import torch when they are loaded (the command line only inside a verb)."""

PURE = {"allocator", "core", "errors", "partitioner", "scheduler", "platforms"}
"""Parts that import nothing of ours but what `ALLOWED` names."""

ALLOWED = {
    "allocator": set[str](),
    "core": {"funcpipe.core", "funcpipe.errors"},
    "errors": set[str](),
    "partitioner": {"funcpipe.core", "funcpipe.errors", "funcpipe.partitioner", "funcpipe.scheduler.schedules"},
    "scheduler": {"funcpipe.core", "funcpipe.errors", "funcpipe.scheduler", "funcpipe.comm.scatter_reduce"},
    "platforms": {"funcpipe.allocator", "funcpipe.core", "funcpipe.errors", "funcpipe.platforms"},
    "comm": {"funcpipe.core", "funcpipe.errors", "funcpipe.comm", "funcpipe.platforms.base"},
}


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module or ""


def test_there_is_something_to_walk() -> None:
    assert {part(path) for path in MODULES} >= set(ALLOWED)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_what_its_place_allows(path: Path) -> None:
    names = set(imported(path))
    ours = {name for name in names if name.split(".")[0] == "funcpipe"}
    for name in ours:
        allowed = ALLOWED.get(part(path))
        assert allowed is None or any(name == a or name.startswith(a + ".") for a in allowed), name
    tops = {name.split(".")[0] for name in names}
    assert "torch" not in tops or part(path) in WITH_TORCH
    assert "pyomo" not in tops or path.relative_to(PACKAGE).as_posix().startswith("partitioner/")
    assert not tops & {"boto3", "botocore"} or path.name == "s3.py" or path.parent.name == "aws"
    alibaba = {top for top in tops if top.startswith(("alibabacloud", "oss2", "Tea", "darabonba"))}
    assert not alibaba or path.name == "oss.py" or path.parent.name == "aliyun"
    if part(path) in ("core", "errors"):
        assert tops <= set(sys.stdlib_module_names) | {"funcpipe"}


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import funcpipe",
        "import funcpipe.core",
        "import funcpipe.cli; funcpipe.cli.build_parser()",
        "import funcpipe.partitioner.exact",
        "import funcpipe.partitioner.optimize",
        "import funcpipe.predict",
    ],
)
def test_planning_loads_neither_torch_nor_a_solver(statement: str) -> None:
    heavy = {"torch", "pyomo", "highspy", "gurobipy", "pyscipopt", "boto3", "oss2", "matplotlib"}
    assert not loaded_by(statement) & heavy


def test_a_worker_loads_no_solver_and_no_cloud() -> None:
    assert not loaded_by("import funcpipe.worker") & {"pyomo", "highspy", "gurobipy", "pyscipopt", "boto3", "oss2"}


def test_the_root_links_lead_to_the_package_and_hide_nobody_s_comm() -> None:
    for name in ("partitioner", "scheduler", "comm", "platforms"):
        assert (ROOT / name).is_symlink()
        assert (ROOT / name).resolve() == PACKAGE / name
    assert not (PACKAGE / "comm" / "__init__.py").exists()


def test_a_comm_package_that_is_installed_wins_over_the_link(tmp_path: Path) -> None:
    """A regular package later on the path comes before the link, which has no __init__.py."""
    (tmp_path / "comm").mkdir()
    (tmp_path / "comm" / "__init__.py").write_text("NAME = 'installed'\n")
    code = f"import sys; sys.path[:] = [{str(ROOT)!r}, {str(tmp_path)!r}, *sys.path]; import comm; print(comm.NAME)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "installed"
