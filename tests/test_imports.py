"""Who may import whom: walks the imports of every module."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "funcpipe"
MODULES = sorted(PACKAGE.rglob("*.py"))

ROOMS = {
    "errors": set[str](),
    "core": {"errors"},
    "platforms.base": {"core", "errors"},
    "model": {"core", "errors"},
    "comm": {"core", "errors", "platforms.base"},
    "scheduler": {"core", "errors", "comm.collectives", "comm.sum_pattern"},
    "partitioner": {"core", "errors", "scheduler"},
    "data": {"core", "errors", "platforms.base", "platforms.catalog"},
    "training": {"core", "errors", "model", "comm", "platforms.base"},
    "profiler": {"core", "errors", "model", "comm", "platforms.base"},
    "runstate": {"core", "errors", "comm", "platforms.base", "training"},
    "worker": {
        *("core", "errors", "model", "comm", "scheduler", "platforms.base", "training", "profiler", "runstate"),
    },
    "platforms": {"core", "errors", "platforms.base", "worker"},
    "examples": set[str](),
    "analysis": {"core", "errors", "comm.collectives", "comm.sum_pattern", "scheduler", "partitioner"},
}
"""What each room may import besides itself; those above may import whatever is named here."""

NEIGHBOURS = ("neighbours", "neighbours.provisioning", "neighbours.parameter_server", "neighbours.history")
"""Beside the engine, which none of its rooms may import, from below to the top."""

ABOVE = ("client", *NEIGHBOURS, "testing", "loggers", "api", "sweep", "show", "cli", "__init__", "__main__")
"""From below to the top: each may import all rooms, and those of `ABOVE` that come before it."""

BASE = tuple(f"platforms.{name}" for name in ("base", "wrappers", "process", "room", "gpus", "function_group"))
"""The modules of `platforms` that rooms below it lean on: the Protocols, and what is made of nothing else."""

WITH_TORCH = {
    *("api", "cli", "client", "comm", "examples", "loggers", "model", "profiler", "runstate", "show"),
    *("sweep", "testing", "training", "neighbours.parameter_server", "worker"),
}
"""Rooms that may import torch when they are loaded (the command line only inside a verb)."""


LATE = {("core.texts", "show.notebook")}
"""The only import upwards, inside a method: a value of core displays itself as `show` describes it."""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    if module in BASE:
        return "platforms.base"
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "neighbours" else parts[0]


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """Every module that `path` imports, at its top or inside a function; a name imported from a package as both."""
    return frozenset(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            module = node.module or ""
            for alias in node.names:
                yield f"{module}.{alias.name}" if is_module(f"{module}.{alias.name}") else module


@functools.cache
def is_module(name: str) -> bool:
    place = ROOT.joinpath(*name.split("."))
    return name.startswith("funcpipe") and (place.with_suffix(".py").exists() or (place / "__init__.py").exists())


def ours(path: Path) -> set[str]:
    """Which of our modules `path` imports, without the package's name."""
    found = {name.partition(".")[2] for name in imported(path) if name.split(".")[0] == "funcpipe"} - {""}
    return {name for name in found if (module_of(path), name) not in LATE}


def test_every_room_has_a_rule() -> None:
    assert {room_of(module_of(path)) for path in MODULES} == ROOMS.keys() | set(ABOVE)


def test_modules_import_what_their_rooms_may() -> None:
    assert [told for path in MODULES for told in violations(path)] == []


def violations(path: Path) -> Iterator[str]:
    """What the module imports although it may not."""
    module = module_of(path)
    room = room_of(module)
    for name in sorted(ours(path)):
        if room in ABOVE:
            allowed = room_of(name) in ROOMS.keys() | set(ABOVE[: ABOVE.index(room) + 1])
        else:
            allowed = bool({room_of(name), name} & (ROOMS[room] | {room}))
        if not allowed:
            yield f"{module} imports {name}"
    tops = {name.split(".")[0] for name in imported(path)}
    yield from (f"{module} imports {top}" for top in sorted(tops) if not may_use(module, room, top))


def may_use(module: str, room: str, top: str) -> bool:
    """Whether a module may import the package `top`, which is not ours."""
    allowed = {
        "torch": room in WITH_TORCH,
        "pyomo": module.startswith("partitioner.mip"),
        "boto3": module.startswith("platforms.aws."),
        "botocore": module.startswith("platforms.aws."),
        "redis": module == "platforms.redis",
        "ray": module == "platforms.ray.library",
        "rich": room in ("cli", "loggers", "show"),
    }
    if top.startswith(("alibabacloud", "oss2", "Tea", "darabonba")) and not module.startswith("platforms.aliyun."):
        return False
    if room in ("core", "errors") and top not in sys.stdlib_module_names | {"funcpipe"}:
        return False
    return allowed.get(top, True)


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("scheduler/new.py", "import funcpipe.client.prepare.job", "scheduler.new imports client.prepare.job"),
        ("scheduler/new.py", "def f():\n    from funcpipe import client", "scheduler.new imports client"),
        ("client/new.py", "from funcpipe.cli import main", "client.new imports cli"),
        ("scheduler/new.py", "import torch.nn", "scheduler.new imports torch"),
        ("partitioner/new.py", "import pyomo.environ", "partitioner.new imports pyomo"),
        ("platforms/new.py", "from boto3.session import Session", "platforms.new imports boto3"),
        ("platforms/new.py", "import oss2", "platforms.new imports oss2"),
        ("core/new.py", "import numpy", "core.new imports numpy"),
        ("scheduler/new.py", "import math, numpy, funcpipe.core\nfrom funcpipe.comm.collectives import x", None),
    ],
)
def test_what_a_module_may_not_import_is_found(
    file: str, text: str, told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(text)
    assert list(violations(tmp_path / file)) == ([] if told is None else [told])


def test_no_folders_import_each_other_in_a_circle() -> None:
    """Folders inside rooms too; `platforms.base` and what it is made of count as one of their own."""
    graph = nx.DiGraph()
    for path in MODULES:
        module = module_of(path)
        if module in ABOVE or path.parent == PACKAGE:
            continue
        graph.add_edges_from((folder_of(module), folder_of(name)) for name in ours(path) if name != "errors")
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    assert list(nx.simple_cycles(graph)) == []


def test_no_files_of_core_import_each_other_in_a_circle() -> None:
    graph = nx.DiGraph()
    for path in (PACKAGE / "core").glob("[!_]*.py"):
        graph.add_edges_from((module_of(path), name) for name in ours(path) if name.startswith("core."))
    assert list(nx.simple_cycles(graph)) == []


def folder_of(module: str) -> str:
    if module in BASE:
        return "platforms.base"
    return module if (PACKAGE / module.replace(".", "/")).is_dir() else module.rpartition(".")[0]


def loaded_by(*statements: str) -> dict[str, set[str]]:
    """The modules that a new process has loaded after each of these, one after another."""
    code = "".join(f"import sys; {statement}; print(*sys.modules)\n" for statement in statements)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {statement: set(line.split()) for statement, line in zip(statements, done.stdout.splitlines(), strict=True)}


HEAVY = {"torch", "pyomo", "highspy", "gurobipy", "pyscipopt", "boto3", "oss2", "redis", "matplotlib", "bokeh", "ray"}


def test_planning_loads_neither_torch_nor_a_solver() -> None:
    found = loaded_by(
        "import funcpipe",
        "import funcpipe.core",
        "import funcpipe.cli; from funcpipe.cli.commands import Commands; Commands().verbs()",
        "import funcpipe.partitioner.search.exact",
        "import funcpipe.partitioner.optimize",
        "import funcpipe.analysis.predict",
        "import funcpipe.neighbours.provisioning.workload, funcpipe.neighbours.provisioning.fit_loss",
        "import funcpipe.neighbours.provisioning.spotdnn",
        "import funcpipe.neighbours.history.journal, funcpipe.neighbours.history.learned",
    )
    assert {statement: heavy for statement, loaded in found.items() if (heavy := loaded & HEAVY)} == {}


def test_a_function_loads_no_client_no_search_no_solver_and_no_cloud() -> None:
    modules = (
        *("worker.attempt", "profiler.remote.function", "platforms.entry"),
        "neighbours.parameter_server.function_worker",
    )
    for statement, loaded in loaded_by(*(f"import funcpipe.{module}" for module in modules)).items():
        assert not loaded & ((HEAVY - {"torch"}) | {"rich", "networkx"}), statement
        forbidden = ("client", "partitioner", "analysis", "show", "api", "cli")
        assert not {name for name in loaded if name.startswith(tuple(f"funcpipe.{room}" for room in forbidden))}


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


def test_an_import_through_a_root_link_fails_with_the_right_name() -> None:
    """Else every class would exist twice."""
    names = [module for name in ("scheduler", "partitioner", "platforms") for module in (name, f"{name}.tasks")]
    code = f"""
import importlib, sys
sys.path.insert(0, {str(ROOT)!r})
for name in {names}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    rooms = [name.partition(".")[0] for name in names]
    assert found.stdout.splitlines() == [
        f"import funcpipe.{room} instead of {room}, which is a link to it" for room in rooms
    ]


def test_no_test_imports_experiments() -> None:
    """Both may use `tests.support`."""
    named = [path for path in (ROOT / "tests").rglob("*.py") if "experiments" in path.read_text()]
    assert [path for path in named if "experiments" in {name.split(".")[0] for name in imported(path)}] == []
