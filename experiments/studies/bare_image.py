"""The file system of a Dockerfile, made without docker: its steps are carried out in a minimal Debian, by Linux's root.

Each step that changes files is a layer of overlayfs, kept under a name that follows from the steps before it. Debian's
own python3 stands for the base image's. FROM, ENV, WORKDIR, COPY, RUN, USER and ENTRYPOINT are what ours have.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

DEBIAN, MIRROR = "bookworm", "http://deb.debian.org/debian"  # whose python3 is 3.11
_PACKAGES = "python3,python3-pip,ca-certificates,netbase"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PASSED_ON = re.compile(r"PIP_|SSL_CERT|(https?|no)_proxy$", re.IGNORECASE)
_ENTER = """
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2,workdir=$3" "$4"
mount -t proc proc "$4/proc"
cp /etc/resolv.conf "$4/etc/resolv.conf"
for folder in $5; do mkdir -p "$4/$folder" && mount --rbind "$folder" "$4/$folder"; done
chroot "$4" /usr/bin/env -i "${@:7}" /bin/sh -c "$6"
"""
"""Lower folders, upper folder, work folder, root, folders to share, command, variables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What a Dockerfile makes: the folders of its layers, the first at the bottom, and how a container begins."""

    layers: tuple[Path, ...]
    key: str
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({"PATH": _PATH}))
    folder: str = "/"
    user: str = ""
    command: tuple[str, ...] = ()

    @property
    def lower(self) -> str:
        """The layers as overlayfs names them, the last one first."""
        return ":".join(map(str, reversed(self.layers)))


class Builder:
    """Builds images with layers in the folder `cache`; steps see the folders `shared` of this machine."""

    def __init__(self, cache: Path, shared: Sequence[str] = (), *, quiet: bool = False) -> None:
        self._cache, self._shared, self._quiet = cache.resolve(), tuple(shared), quiet

    def build(self, context: Path) -> Image:
        """The image of the Dockerfile in the folder `context`."""
        image = Image(layers=(), key="")
        for line in (context / "Dockerfile").read_text().splitlines():
            if not self._quiet:
                print(f"   {line}", flush=True)
            image = self._step(image, context, *line.split(" ", 1))
        return image

    def _step(self, image: Image, context: Path, verb: str, rest: str) -> Image:
        match verb:
            case "FROM":
                return self._base(rest)
            case "ENV":
                values = dict(word.split("=", 1) for word in rest.split())
                return replace(image, environment=MappingProxyType({**image.environment, **values}))
            case "WORKDIR":
                return replace(self._run(image, f"mkdir -p {rest}", line=f"WORKDIR {rest}"), folder=rest)
            case "COPY":
                return self._copy(image, context, *rest.split())
            case "RUN":
                return self._run(image, f"cd {image.folder} && {rest}", line=f"RUN {rest}")
            case "USER":
                return replace(image, user=rest)
            case "ENTRYPOINT":
                return replace(image, command=tuple(json.loads(rest)))
            case _:
                raise SystemExit(f"no such step is known here: {verb} {rest}")

    def _base(self, name: str) -> Image:
        """Debian with its python3, which must be of the version that the Dockerfile's base has."""
        found = self._cache / f"{DEBIAN}-{_PACKAGES.count(',')}"
        if not found.exists():
            part = self._cache / "base.part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            words = ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", DEBIAN, str(part), MIRROR]
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
            (part / "usr/lib/python3.11/EXTERNALLY-MANAGED").unlink()  # the base image's python is not Debian's
            (part / "usr/local/bin/python").symlink_to("/usr/bin/python3")
            (part / "dev/shm").rmdir()
            part.rename(found)
        version = (found / "usr/bin/python3").readlink().name.removeprefix("python")
        wanted = name.rpartition(":")[2].removesuffix("-slim")
        if version != wanted:
            raise SystemExit(f"{name} has Python {wanted}, this Debian has {version}")
        return Image(layers=(found,), key=f"{DEBIAN} {name}")

    def _copy(self, image: Image, context: Path, source: str, target: str) -> Image:
        key = _digest(image.key, f"COPY {source} {target}", *_contents(context / source))
        layer = self._cache / key
        if not layer.exists():
            part, place = self._part(), Path(image.folder.lstrip("/")) / target
            (part / place).parent.mkdir(parents=True, exist_ok=True)
            if (context / source).is_dir():
                shutil.copytree(context / source, part / place, dirs_exist_ok=True)
            else:
                (part / place).mkdir(parents=True, exist_ok=True)
                shutil.copy2(context / source, part / place / source)
            part.rename(layer)
        return replace(image, layers=(*image.layers, layer), key=key)

    def _run(self, image: Image, command: str, *, line: str) -> Image:
        key = _digest(image.key, line, str(sorted(image.environment.items())))
        layer = self._cache / key
        if not layer.exists():
            began_s, part = time.monotonic(), self._part()
            inherited = {name: value for name, value in os.environ.items() if _PASSED_ON.match(name)}
            variables = {"HOME": "/root", "DEBIAN_FRONTEND": "noninteractive", **inherited, **image.environment}
            with tempfile.TemporaryDirectory(dir=self._cache) as work, tempfile.TemporaryDirectory() as root:
                words = ["unshare", "--mount", "bash", "-euc", _ENTER, "-", image.lower, str(part), work, root]
                words += [" ".join(self._shared), command, *(f"{name}={value}" for name, value in variables.items())]
                done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode:
                raise SystemExit(f"{done.stdout[-4000:]}\n{line}\nfailed")
            part.rename(layer)
            print(f"   … {time.monotonic() - began_s:.0f} s, {_size_mb(layer)} MB", flush=True)
        return replace(image, layers=(*image.layers, layer), key=key)

    def _part(self) -> Path:
        part = self._cache / "layer.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        return part


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _contents(path: Path) -> list[str]:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return [
        f"{file.relative_to(path)}{file.stat().st_mode:o}{hashlib.sha256(file.read_bytes()).hexdigest()}"
        for file in files
    ]


def _size_mb(folder: Path) -> int:
    return sum(file.lstat().st_blocks * 512 for file in folder.rglob("*")) >> 20
