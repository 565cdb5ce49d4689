"""How emulated clouds start the processes of functions: with this machine's Python, unless a test says otherwise."""

import site
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol


class Process(Protocol):
    """What clouds use of a process that was started: what `subprocess.Popen` says of it."""

    @property
    def pid(self) -> int: ...

    @property
    def stdout(self) -> IO[str] | None: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


class Enter(Protocol):
    """What a new process calls to be in its control group, of which `members` is the file; None without a group."""

    @property
    def members(self) -> Path | None: ...

    def __call__(self) -> None: ...


class Start(Protocol):
    """Starts a function's process.

    `image` holds the files that its image was made from, `command` is the image's, `variables` are what the cloud adds
    to its environment; the new process calls `enter` before anything else, to be in its control group.
    """

    def __call__(self, command: Sequence[str], image: Path, variables: Mapping[str, str], enter: Enter) -> Process: ...


def in_clean_folder(
    command: Sequence[str], image: Path, variables: Mapping[str, str], enter: Enter
) -> "subprocess.Popen[str]":
    """A process of this machine's Python, which finds the image's files and installed packages, and nothing else."""
    assert command[0] == "python"
    return subprocess.Popen(
        [sys.executable, "-S", *command[1:]],  # -S: nothing that .pth files add
        cwd=image,
        env={**clean_environment(str(image)), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=enter,
    )


def clean_environment(*folders: str) -> dict[str, str]:
    """The environment of a process that finds these folders, and installed packages."""
    path = ":".join([*folders, site.getsitepackages()[0]])
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
