"""How emulated clouds start the processes of functions: with this machine's Python, unless a test says otherwise."""

import site
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol


class Start(Protocol):
    """Starts a function's process.

    `image` holds the files that its image was made from, `command` is the image's, `variables` are what the cloud adds
    to its environment; the new process calls `enter` before anything else, to be in its control group.
    """

    def __call__(
        self, command: Sequence[str], image: Path, variables: Mapping[str, str], enter: Callable[[], None]
    ) -> "subprocess.Popen[str]": ...


def in_clean_folder(
    command: Sequence[str], image: Path, variables: Mapping[str, str], enter: Callable[[], None]
) -> "subprocess.Popen[str]":
    """A process of this machine's Python, which finds the image's files and installed packages, and nothing else."""
    path = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": f"{image}:{site.getsitepackages()[0]}"}
    assert command[0] == "python"
    return subprocess.Popen(
        [sys.executable, "-S", *command[1:]],  # -S: nothing that .pth files add
        cwd=image,
        env={**path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=enter,
    )
