"""The platforms that funcpipe knows by name, their storage, and specifications read from files."""

import os
from dataclasses import replace
from importlib import resources
from urllib.parse import unquote, urlsplit

from funcpipe.core import PlatformSpec, from_text, read
from funcpipe.errors import InvalidValue
from funcpipe.platforms.base import Storage
from funcpipe.platforms.files import FileStorage

LOCAL = "local"


def spec_names() -> tuple[str, ...]:
    """The platforms whose specification ships with funcpipe."""
    files = resources.files("funcpipe.platforms").joinpath("specs").iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


def load_spec(name: str) -> PlatformSpec:
    """The specification called `name`, or the one in the file of that path."""
    if name not in spec_names():
        if os.path.exists(name):
            return read(PlatformSpec, name)
        raise InvalidValue("platform", name, f"must be one of {', '.join(spec_names())}, or a specification's file")
    text = resources.files("funcpipe.platforms").joinpath("specs", f"{name}.json").read_text(encoding="utf-8")
    spec = from_text(PlatformSpec, text, source=f"{name}.json")
    return replace(spec, shared_cores=len(os.sched_getaffinity(0))) if name == LOCAL else spec


def open_storage(url: str) -> Storage:
    """The object storage at `url`: `file:///folder`."""
    parts = urlsplit(url)
    if parts.scheme != "file" or parts.netloc or not parts.path:
        raise InvalidValue("storage", url, "must be the URL of a folder, such as file:///tmp/objects")
    return FileStorage(unquote(parts.path))
