"""What an image is built from: funcpipe, what functions need and nothing else; the same for the same contents."""

import ast
import io
import os
import shlex
import shutil
import stat
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from importlib import metadata
from pathlib import Path, PurePosixPath

import pytest

import funcpipe
from funcpipe.errors import InvalidValue
from funcpipe.platforms.shared.package import Package, make_package, read_requirements, shipped_files
from tests.cloud_emulation.images import unreadable
from tests.cloud_emulation.processes import clean_environment
from tests.test_imports import is_module

ROOT = Path(__file__).parents[2]
COMMAND = ("python", "-m", "somewhere")
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def test_it_holds_what_functions_run_and_pins_what_they_need() -> None:
    package = make_package(COMMAND, ["boto3"], ["einops>=0.8"])
    source = Path(funcpipe.__file__).parent
    assert package.files["funcpipe/worker/loop.py"] == (source / "worker" / "loop.py").read_bytes()
    for room in ("core", "comm", "model", "training", "data", "worker", "examples"):
        modules = {f"funcpipe/{file.relative_to(source).as_posix()}" for file in (source / room).rglob("*.py")}
        assert modules <= package.files.keys()
    rooms = {path.split("/")[1] for path in package.files if path.count("/") > 1}
    assert not rooms & {"api", "cli", "client", "loggers", "partitioner", "report", "testing"}
    lines = package.files["requirements.txt"].decode().splitlines()
    assert f"boto3=={metadata.version('boto3')}" in lines
    assert lines[-1] == "einops>=0.8"
    assert any(line.startswith("torch==") and line.endswith("+cpu") for line in lines)
    assert not [line for line in lines if line.startswith(("pyomo", "highspy", "rich"))]
    *made, preload, start = package.files["Dockerfile"].decode().splitlines()
    assert start == 'ENTRYPOINT ["python", "-m", "somewhere"]'
    assert preload.startswith("ENV LD_PRELOAD=libtcmalloc_minimal.so.4 ")
    assert any("apt-get install --yes --no-install-recommends libtcmalloc-minimal4 " in line for line in made)


def test_it_has_all_that_the_package_requires_now() -> None:
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    wanted = {line.split()[0] for line in settings["options"]["install_requires"].strip().splitlines()}
    lines = make_package(COMMAND, ()).files["requirements.txt"].decode().splitlines()
    missing = wanted - {"pyomo", "highspy", "rich", "click"} - {line.partition("==")[0] for line in lines}
    assert not missing, "what is installed here is of an earlier setup.cfg: `make setup` installs it anew"


@pytest.mark.parametrize("entry", ["funcpipe.platforms.entry_aws.handler", "funcpipe.platforms.entry_aliyun"])
def test_what_functions_have_loads_nothing_that_they_lack(entry: str) -> None:
    """What is imported inside functions for clients alone may be missing."""
    files = shipped_files(("python", "-m", entry))
    has = {f"{path.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__") for path in files}
    assert entry.removesuffix(".handler") in has
    lacking = {(path, name) for path, data in files.items() if path.endswith(".py") for name in loaded_with(data) - has}
    assert not lacking


def test_what_is_compiled_goes_with_what_imports_it() -> None:
    shipped = {path for path in shipped_files(COMMAND) if path.endswith(".so")}
    here = {f"funcpipe/comm/{file.name}" for file in (Path(funcpipe.__file__).parent / "comm").glob("*.abi3.so")}
    assert shipped == here


def loaded_with(source: bytes) -> set[str]:
    """The modules of funcpipe that are loaded with a module: not what it imports inside functions, or for types."""
    names = set()
    for node in ast.parse(source).body:
        match node:
            case ast.Import():
                names |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(module)):
                names |= {full if is_module(full := f"{module}.{alias.name}") else module for alias in node.names}
    return {name for name in names if name.startswith("funcpipe")}


def test_another_text_of_the_command_line_makes_no_other_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(Path(funcpipe.__file__).parent, tmp_path / "funcpipe", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr("funcpipe.platforms.shared.package.resources.files", lambda name: tmp_path / name)
    before = make_package(COMMAND, ()).digest

    def digest_after(file: str) -> str:
        path = tmp_path / "funcpipe" / file
        path.write_text(path.read_text() + "\n# changed\n")
        return make_package(COMMAND, ()).digest

    for file in ("cli/commands.py", "client/prepare/job.py", "api/__init__.py", "platforms/shared/package.py"):
        assert digest_after(file) == before
    (tmp_path / "funcpipe" / "cli" / "a_new_verb.py").touch()
    assert make_package(COMMAND, ()).digest == before
    assert digest_after("worker/loop.py") != before


USERS = """
import funcpipe.loggers
from funcpipe import Callback, FuncPipe, Plan
from funcpipe.client.prepare.site import open_local

class Mine(Callback):
    def name(self) -> FuncPipe | None: ...

def train(): return FuncPipe(lambda: None)
"""


def test_a_module_of_a_user_that_imports_clients_loads_in_a_function(tmp_path: Path) -> None:
    make_package(COMMAND, ()).write(tmp_path)
    (tmp_path / "theirs.py").write_text(USERS)
    code = """
import pickle
import funcpipe.platforms.entry, theirs
from funcpipe.errors import InputError
assert not isinstance(theirs.Plan, type(theirs.FuncPipe)) and not isinstance(3, theirs.Mine)
assert pickle.loads(b"cfuncpipe.api\\nFuncPipe\\n.").__module__ == "funcpipe.api"
for use in (theirs.train, theirs.Mine, theirs.open_local, lambda: theirs.FuncPipe.anything):
    try:
        use()
    except InputError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=tmp_path,
        env=clean_environment(str(tmp_path)),
        capture_output=True,
        text=True,
    )
    places = (
        "funcpipe.api.FuncPipe",
        "funcpipe.client.follow.callbacks.Callback",
        "funcpipe.client.prepare.site.open_local",
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == [*places, places[0]], done.stderr
    assert "is for clients, functions do not have it: use it in what only your client calls" in done.stdout


def test_the_digest_and_the_archive_follow_from_the_contents() -> None:
    package, again = make_package(COMMAND, ()), make_package(COMMAND, ())
    assert (package.digest, package.archive()) == (again.digest, again.archive())
    assert make_package(COMMAND, (), ("einops",)).digest != package.digest
    with zipfile.ZipFile(io.BytesIO(package.archive())) as archive:
        files = {entry.filename: archive.read(entry) for entry in archive.infolist() if not entry.is_dir()}
    assert files == dict(package.files)


DIGEST = f"sha256:{'0a' * 32}"


@pytest.mark.parametrize(
    "image",
    [
        f"public.ecr.aws/docker/library/python:3.11-slim@{DIGEST}",
        f"python@{DIGEST}",
        "registry.test:5000/mirror/python:3.11-slim",
    ],
)
def test_a_base_image_is_that_which_is_wanted_and_another_one_makes_another_image(image: str) -> None:
    usual, other = make_package(COMMAND, ()), make_package(COMMAND, (), base=image)
    assert first_line(usual) == f"FROM public.ecr.aws/docker/library/python:{HERE}-slim"
    assert first_line(other) == f"FROM {image}"
    assert other.digest != usual.digest
    (checked,) = [line for line in other.files["Dockerfile"].decode().splitlines() if "version_info" in line]
    program = checked.removeprefix("RUN python -c ")
    assert subprocess.run([sys.executable, "-c", *shlex.split(program)], capture_output=True).returncode == 0
    older = program.replace(HERE.replace(".", ", "), "3, 1")
    assert older != program
    failed = subprocess.run([sys.executable, "-c", *shlex.split(older)], capture_output=True, text=True)
    assert f"the base image has Python {HERE}" in failed.stderr


def first_line(package: Package) -> str:
    return package.files["Dockerfile"].decode().splitlines()[0]


@pytest.mark.parametrize(
    "image",
    [
        "",
        "python:3.11-slim@sha256:12",
        f"python:3.11-slim@{DIGEST.upper()}",
        "python:3.11-slim AS base",
        "python\nRUN rm -r /",
        "python@latest",
        "https://python.test/python",
    ],
)
def test_what_names_no_image_is_no_base(image: str) -> None:
    with pytest.raises(InvalidValue, match=r"base image must be an image's name, .*@sha256:"):
        make_package(COMMAND, (), base=image)


def test_everybody_can_read_what_an_image_is_built_from(tmp_path: Path) -> None:
    package = make_package(COMMAND, ())
    with zipfile.ZipFile(io.BytesIO(package.archive())) as archive:
        modes = {entry.filename: stat.filemode(entry.external_attr >> 16) for entry in archive.infolist()}
    folders = {f"{parent}/" for path in package.files for parent in PurePosixPath(path).parents[:-1]}
    assert modes == dict.fromkeys(package.files, "-rw-r--r--") | dict.fromkeys(folders, "drwxr-xr-x")
    before = os.umask(0o077)
    try:
        package.write(tmp_path / "here")
    finally:
        os.umask(before)
    found = {stat.filemode(path.stat().st_mode) for path in (tmp_path / "here").rglob("*")}
    assert found == {"-rw-r--r--", "drwxr-xr-x"}
    (made,) = [line for line in package.files["Dockerfile"].decode().splitlines() if "compileall" in line]
    assert made.endswith("&& chmod -R a+rX .")


def test_the_emulated_build_looks_at_the_image_and_not_at_what_functions_write(tmp_path: Path) -> None:
    (tmp_path / "__pycache__").mkdir(mode=0o700)
    (tmp_path / "code.py").touch()
    assert unreadable(tmp_path) is None
    (tmp_path / "code.py").chmod(0o600)
    assert unreadable(tmp_path) == tmp_path / "code.py"


def test_what_is_not_installed_or_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="'no-such-distribution'"):
        make_package(COMMAND, ["no-such-distribution"])
    with pytest.raises(InvalidValue, match="requirements must be a file that can be read"):
        read_requirements(str(tmp_path / "none"))
    (tmp_path / "some").write_text("# a comment\n\neinops>=0.8\n")
    assert read_requirements(str(tmp_path / "some")) == ("einops>=0.8",)
