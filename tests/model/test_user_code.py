"""Metadata say what is installed, not the name of a folder."""

import importlib
import linecache
import zipfile
from pathlib import Path
from types import ModuleType

import coverage
import pytest
import torch
from torch import Tensor, nn

from funcpipe.errors import ModelError
from funcpipe.model.graph import trace
from funcpipe.model.graph.user_code import is_installed, is_standard, is_users_file


def install(folder: Path, name: str) -> None:
    """Write what `pip install --target` writes beside a package."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "RECORD").write_text(f"{name}/__init__.py,,\n{metadata.name}/RECORD,,\n")


def made(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, code: str = "") -> ModuleType:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def test_packages_of_this_environment_and_the_standard_library() -> None:
    assert is_installed(torch.__file__)
    assert not is_standard(torch.__file__)
    assert not is_users_file(torch.__file__)
    assert is_standard(linecache.__file__)
    assert is_installed(linecache.__file__)
    assert is_users_file(pytest.__file__)
    assert not is_users_file("<string>")
    assert is_users_file("<ipython-input-3-8f>")
    assert is_users_file(f"{Path(torch.__file__).parent}vision/ops.py")


def test_a_folder_of_any_name_with_metadata_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "libs"
    folder.mkdir()
    install(folder, "packaged_for_tests")
    assert is_installed(str(made(folder, "packaged_for_tests", monkeypatch).__file__))
    assert not is_installed(str(made(folder, "beside_for_tests", monkeypatch).__file__))


def test_an_archive_with_metadata_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "libs.zip", "w") as archive:
        archive.writestr("zipped_for_tests/__init__.py", "")
        archive.writestr("zipped_for_tests-1.0.dist-info/METADATA", "Name: zipped_for_tests\nVersion: 1.0\n")
        archive.writestr("zipped_for_tests-1.0.dist-info/RECORD", "zipped_for_tests/__init__.py,,\n")
    monkeypatch.syspath_prepend(tmp_path / "libs.zip")
    assert is_installed(str(importlib.import_module("zipped_for_tests").__file__))


def test_what_has_no_metadata_or_is_edited_in_place_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_installed(str(made(tmp_path / "site-packages", "named_like_it", monkeypatch).__file__))
    project = tmp_path / "project"
    (project / "edited.egg-info").mkdir(parents=True)
    (project / "edited.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: edited\nVersion: 1.0\n")
    (project / "edited.egg-info" / "SOURCES.txt").write_text("edited/__init__.py\n")
    assert not is_installed(str(made(project, "edited", monkeypatch).__file__))


class Calls(nn.Module):
    def __init__(self, library: ModuleType) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fails = library.fails

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fails(self.linear(x))
        return y


def test_an_error_inside_a_library_names_the_users_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "libs"
    folder.mkdir()
    install(folder, "failing_for_tests")
    library = made(folder, "failing_for_tests", monkeypatch, "def fails(x):\n    raise ValueError('no such size')\n")
    with pytest.raises(ModelError, match=r"test_user_code.py:\d+: `y: Tensor = self.fails\(.*ValueError: no such size"):
        trace(Calls(library), (torch.randn(2, 4),))


MEASURED = """
from funcpipe.errors import ModelError
from funcpipe.model.graph import trace

def traced(model, batch):
    graph = trace(model, batch)
    return graph

def is_traced(model, batch):
    try:
        traced(model, batch)
    except ModelError:
        return False
    return True
"""


class Counts(nn.Linear):
    """Adds how often a forward has run, which a graph cannot."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        Counts.runs += 1
        return super().forward(x) + Counts.runs


def test_the_coverage_of_a_script_is_measured_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "measured_for_tests" / "__init__.py"
    measured = coverage.Coverage(data_file=None, config_file=False, include=[str(file)])
    with measured.collect():
        script = made(tmp_path, "measured_for_tests", monkeypatch, MEASURED)
        assert script.is_traced(nn.Linear(2, 2), (torch.ones(2, 2),))
        assert not script.is_traced(Counts(2, 2), (torch.ones(2, 2),))
    assert measured.analysis2(str(file))[3] == []
