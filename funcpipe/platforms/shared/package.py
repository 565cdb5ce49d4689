"""The package in the image of a cloud function: funcpipe, its requirements, its entry; and docker to build it."""

import ast
import functools
import hashlib
import io
import re
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from funcpipe.core.distribution import requirements
from funcpipe.errors import InvalidValue, PlatformError, PlatformRefused
from funcpipe.platforms.process import PACKAGE, variables

_NAMED_BY_BUNDLES = ("funcpipe.core", "funcpipe.data", "funcpipe.examples", "funcpipe.model", "funcpipe.training")
_FOR_CLIENTS = (
    *("funcpipe.api.", "funcpipe.cli.", "funcpipe.client.", "funcpipe.partitioner.", "funcpipe.show."),
    *("funcpipe.platforms.ray.", "funcpipe.platforms.local.platform.", "funcpipe.platforms.shared.package."),
)
"""Modules that others import only where no function of a cloud comes by; a test runs a function without them."""

_ONLY_FOR_PLANNING = {"pyomo", "highspy", "rich", "click"}
_BASE = "public.ecr.aws/docker/library/python:{version}-slim"
_IMAGE = re.compile(
    r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?::\d+)?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*(?::\w[\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?",
    re.ASCII,
)
"""An image as docker names it (github.com/distribution/reference), with or without tag and digest."""

_COMPILED = ".abi3.so"
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_CPU_ALONE = "+cpu"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first moment that zip knows: equal files make equal archives
_FILE_MODE, _FOLDER_MODE = 0o644, 0o755
_UNIX = 3  # for zip: modes are those of Unix

MOST_IMAGE_BYTES = 10 * 1024**3
"""The largest image, unpacked, that AWS Lambda and Alibaba Function Compute (without GPU) admit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """The folder that an image is built from: the bytes of each file by its path."""

    files: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        """A name for these contents, which serves as the image's tag."""
        total = hashlib.sha256()
        for path, data in sorted(self.files.items()):
            total.update(f"{path}\0{len(data)}\0".encode() + data)
        return total.hexdigest()[:32]

    @property
    def has_cuda(self) -> bool:
        """True if torch in it is built for GPUs."""
        return _CPU_ALONE not in self.files["requirements.txt"].decode()

    def write(self, folder: Path) -> None:
        """Write the files below `folder`, such that everybody can read them, as in an archive."""
        for path in self._folders():
            (folder / path).mkdir(parents=True, exist_ok=True)
            (folder / path).chmod(_FOLDER_MODE)
        for path, data in self.files.items():
            (folder / path).write_bytes(data)
            (folder / path).chmod(_FILE_MODE)

    def archive(self) -> bytes:
        """Return the files as a zip archive, the same for the same files; everybody can read what is unpacked from it.

        Functions of AWS Lambda run as a user of their own (docs.aws.amazon.com/lambda/latest/dg/images-create.html).
        """
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in self._folders():
                archive.writestr(_entry(f"{path}/", stat.S_IFDIR | _FOLDER_MODE), b"")
            for path, data in sorted(self.files.items()):
                archive.writestr(_entry(path, stat.S_IFREG | _FILE_MODE), data, zipfile.ZIP_DEFLATED)
        return buffer.getvalue()

    def _folders(self) -> list[str]:
        """Return the folders of the files, each after the one that it lies in."""
        return sorted({str(folder) for path in self.files for folder in PurePosixPath(path).parents[:-1]})


def make_package(
    command: Sequence[str],
    needed: Sequence[str],
    extra: Sequence[str] = (),
    base: str | None = None,
    *,
    cuda: bool = False,
) -> Package:
    """The package of a function that begins with `command`, on the image `base`, by default of Python as it is here.

    `needed` are the distributions that the cloud's entry needs besides funcpipe's own, in the versions installed here;
    `extra` are requirements as pip reads them, for what the user's model imports. With `cuda` torch is the usual build
    of PyPI, which brings CUDA's libraries along, and not that for processors alone.
    """
    requirements = [f"--extra-index-url {_TORCH_INDEX}", *_own_requirements(), *map(_pinned, needed), *extra]
    if cuda:
        requirements = [text.replace(_CPU_ALONE, "") for text in requirements[1:]]
    files = shipped_files(command)
    files["requirements.txt"] = ("\n".join(requirements) + "\n").encode()
    files["Dockerfile"] = _dockerfile(command, base).encode()
    return Package(files=MappingProxyType(files))


def shipped_files(command: Sequence[str]) -> dict[str, bytes]:
    """Return the files of funcpipe that functions have which begin with `command`, by path: what they run, and no more.

    These are the modules that the command and payloads name, the rooms whose classes bundles name, and whatever these
    import, at their top or inside a function, but for what is `_FOR_CLIENTS`. `platforms.entry` stands in for all else.
    What is compiled goes as it is here: on another processor it cannot be imported, and those who want it do without.
    """
    found = dict(_sources(resources.files("funcpipe")))
    modules = {_module_of(path): path for path in found if path.endswith((".py", _COMPILED))}
    begin = [name for name in modules for word in command if word == name or word.startswith(f"{name}.")]
    rooms = [name for name in modules if name.startswith(tuple(f"{room}." for room in _NAMED_BY_BUNDLES))]
    waiting, shipped = ["funcpipe.platforms.entry", *begin, *rooms], set[str]()
    while waiting:
        name = waiting.pop()
        if name in modules and name not in shipped and not f"{name}.".startswith(_FOR_CLIENTS):
            shipped.add(name)
            waiting.append(name.rpartition(".")[0])
            if modules[name].endswith(".py"):
                waiting += _imported(name, found[modules[name]])
    data = [path for path in found if PurePosixPath(path).match("specs/*.json") or "specs/regions/" in path]
    return {f"funcpipe/{path}": found[path] for path in sorted([*data, *(modules[name] for name in shipped)])}


def _module_of(path: str) -> str:
    return f"funcpipe.{path.removesuffix(_COMPILED).removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")


@functools.cache
def _imported(name: str, source: bytes) -> tuple[str, ...]:
    """Return what a module imports, or names in a text; the names of funcpipe itself are loaded when they are used."""
    names = list[str]()
    for node in () if name == "funcpipe" else ast.walk(_without_types(ast.parse(source))):
        match node:
            case ast.Import():
                names += [alias.name for alias in node.names]
            case ast.ImportFrom(module=str(module)):
                names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
            case ast.Constant(value=str(text)) if text.startswith("funcpipe."):
                names.append(text)
    return tuple(names)


def _without_types(module: ast.Module) -> ast.Module:
    module.body = [
        node
        for node in module.body
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING")
    ]
    return module


def read_requirements(path: str | None) -> tuple[str, ...]:
    """Return the lines of a requirements file; none where there is no file."""
    if path is None:
        return ()
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidValue("requirements", path, f"must be a file that can be read: {error.strerror}") from error
    return tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))


def _own_requirements() -> list[str]:
    """The distributions that a worker needs, in the versions installed here: bundles load where they were made."""
    found = [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in requirements() if ";" not in text]
    return [_pinned(name) for name in found if name not in _ONLY_FOR_PLANNING]


def _pinned(name: str) -> str:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        raise InvalidValue("the environment", name, "must have every package that functions need; install it") from None
    return f"{name}=={version.partition('+')[0]}{_CPU_ALONE if name == 'torch' else ''}"


def _sources(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    for item in folder.iterdir():
        if item.is_dir() and item.name != "__pycache__":
            yield from _sources(item, f"{prefix}{item.name}/")
        elif item.is_file() and item.name.endswith((".py", ".json", ".toml", "py.typed", _COMPILED)):
            yield prefix + item.name, item.read_bytes()


def _entry(path: str, mode: int) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(path, _EPOCH)
    entry.create_system = _UNIX
    entry.external_attr = mode << 16
    return entry


def _dockerfile(command: Sequence[str], base: str | None) -> str:
    """Return the Dockerfile. Raises InvalidValue for a `base` that names no image."""
    if base is not None and not _IMAGE.fullmatch(base):
        rule = "must be an image's name, such as python:3.11-slim@sha256:…, whose digest has 64 hexadecimal digits"
        raise InvalidValue("base image", base, rule)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    words = ", ".join(f'"{word}"' for word in command)
    preloaded = " ".join(f"{name}={value}" for name, value in variables().items())
    return f"""FROM {base or _BASE.format(version=version)}
{"" if base is None else _SAME_PYTHON.format(version=version.replace(".", ", "))}\
ENV PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
RUN apt-get update && apt-get install --yes --no-install-recommends {PACKAGE} && rm -rf /var/lib/apt/lists/*
WORKDIR /var/task
COPY requirements.txt .
RUN pip install --no-cache-dir --requirement requirements.txt
COPY funcpipe funcpipe
RUN python -m compileall -q funcpipe && chmod -R a+rX .
ENV {preloaded}
ENTRYPOINT [{words}]
"""


_SAME_PYTHON = (
    'RUN python -c "import sys; v = sys.version_info; v[:2] == ({version}) or sys.exit('
    "f'the base image has Python {{v[0]}}.{{v[1]}}, and must have that of the machine that deploys')\"\n"
)
"""Bundles load in the Python that made them."""


class Docker:
    """The program `docker`, or one that understands the same arguments."""

    def __init__(self, program: str = "docker") -> None:
        self.program = program

    def runs(self) -> bool:
        """Return True if it is installed and has its daemon."""
        try:
            return subprocess.run([self.program, "version"], capture_output=True).returncode == 0
        except OSError:
            return False

    def build(self, package: Package, image: str, *, most_bytes: int = MOST_IMAGE_BYTES) -> int:
        """Make `image` from `package` and return its bytes; raises PlatformRefused if there are more than admitted."""
        with tempfile.TemporaryDirectory(prefix="funcpipe-image-") as folder:
            package.write(Path(folder))
            self._do("build", "--platform", "linux/amd64", "--provenance=false", "--tag", image, folder)  # no index
        size = int(self._do("image", "inspect", "--format", "{{.Size}}", image))
        if size > most_bytes:
            raise PlatformRefused(
                f"the image has {size / 1e9:.1f} GB, functions admit {most_bytes / 1e9:.1f} GB unpacked; "
                "take packages out of --requirements"
            )
        return size

    def login(self, registry: str, *, user: str, password: str) -> None:
        """Log in to a registry; the password is not among the arguments."""
        self._do("login", "--username", user, "--password-stdin", registry, standard_input=password)

    def push(self, image: str) -> None:
        """Send `image` to its registry."""
        self._do("push", image)

    def has_pushed(self, image: str) -> bool:
        """Return True if the registry has `image`."""
        return subprocess.run([self.program, "manifest", "inspect", image], capture_output=True).returncode == 0

    def _do(self, *arguments: str, standard_input: str = "") -> str:
        command: Sequence[str] = (self.program, *arguments)
        done = subprocess.run(command, input=standard_input, capture_output=True, text=True)
        if done.returncode:
            raise PlatformError(f"`{' '.join(command)}` failed:\n{done.stderr.strip()[-2000:]}")
        return done.stdout
