"""What a stranger installs: the wheel and the source archive are complete, and an example runs from another folder."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
FILE_NAME = SETUP["metadata"]["name"].replace("-", "_") + "-" + SETUP["metadata"]["version"]
DATA = {".json", ".typed", ".toml", ".html", ".css", ".js"}

pytestmark = pytest.mark.xdist_group("wheel")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, built from a copy of what git tracks."""
    copy = tmp_path_factory.mktemp("source") / "tree"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_symlink():
            continue
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    return _built("sdist", copy, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from nothing but the source archive."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    return _built("wheel", folder / FILE_NAME, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel, and borrows what it requires from this one."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, cwd=folder)
    packages = next((folder / "lib").iterdir()) / "site-packages"
    (packages / "borrowed.pth").write_text(str(Path(pytest.__file__).parents[1]) + "\n")
    return python


def test_it_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    package = ROOT / "funcpipe"
    files = [file for file in package.rglob("*") if file.suffix == ".py" or file.suffix in DATA]
    expected = {f"funcpipe/{file.relative_to(package).as_posix()}" for file in files}
    if shutil.which("cc"):
        expected.add("funcpipe/comm/block_int8_kernel.abi3.so")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == expected


def test_its_metadata_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read(f"{FILE_NAME}.dist-info/METADATA").decode())
        assert archive.read(f"{FILE_NAME}.dist-info/entry_points.txt").decode().split() == [
            *("[console_scripts]", "funcpipe", "=", "funcpipe.cli:main")
        ]
    assert metadata["Name"] == SETUP["metadata"]["name"]
    assert metadata["License-Expression"] or metadata["License"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert str(metadata.get_payload()).startswith("# funcpipe")


def test_the_source_archive_has_what_builds_and_explains_it(source: Path) -> None:
    with tarfile.open(source) as archive:
        names = {name.removeprefix(FILE_NAME + "/") for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "setup.cfg", "pyproject.toml", "docs/running.md"} <= names
    assert {f"examples/{file.name}" for file in (ROOT / "examples").glob("*.py")} <= names


def test_an_example_runs_from_another_folder(python: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "learning_rates.py", tmp_path)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run([python, "learning_rates.py"], cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert re.search(r"learning rate 0\.001: +\d+% right\n(learning.*\n){7}the best of 8 is 0\.\d\d\d\n", found.stdout)
    code = "import funcpipe; print(funcpipe.__file__)"
    found = subprocess.run([python, "-c", code], cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert Path(found.stdout.strip()).is_relative_to(python.parents[1])


def test_its_command_runs(python: Path, tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = python.with_name("funcpipe")
    found = subprocess.run([command, "platforms", "list"], cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "aws-lambda" in found.stdout


def _built(kind: str, tree: Path, output: Path) -> Path:
    """What setuptools builds of the tree, as pip and `build` ask it to."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    found = subprocess.run([sys.executable, "-c", code, output], cwd=tree, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return output / found.stdout.splitlines()[-1]
