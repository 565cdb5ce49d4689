"""Processes of functions in an image's file system, under the conditions of a cloud's sandbox, as root on Linux.

Not root, without capabilities; a read-only root, 512 MB of /tmp and nothing else to write to; /dev without shm; the
memory and the share of a processor of the function's size; process numbers of its own. No name in /etc/passwd and no
HOME: images that are not AWS's have neither. uid and gid are those of AWS Lambda (docs.rs/run-command-on-aws-lambda,
2022-04); that there is no /dev/shm is told by pypi.org/project/lambda-multiprocessing, 2024.
"""

import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments.studies.bare_image import Image
from funcpipe.platforms.local.cgroup import Group, Groups

UID, GID, TMP_MB = 993, 990, 512
_ENTER = f"""
mount --make-rprivate /
mount -t overlay overlay -o "ro,lowerdir=$1" "$2"
mount -t tmpfs -o size={TMP_MB}m,mode=1777,nosuid,nodev tmpfs "$2/tmp"
mount -t proc -o nosuid,nodev,noexec proc "$2/proc"
mount -t tmpfs -o size=64k,mode=755 tmpfs "$2/dev"
for device in "null 3" "zero 5" "full 7" "random 8" "urandom 9"; do
  mknod -m 666 "$2/dev/${{device% *}}" c 1 "${{device#* }}"
done
ln -s /proc/self/fd "$2/dev/fd"
mount -o remount,ro "$2/dev"
exec chroot "$2" /usr/bin/setpriv --reuid={UID} --regid={GID} --clear-groups --no-new-privs --bounding-set=-all \\
  /usr/bin/env -i -C "$3" "${{@:4}}"
"""
"""Lower folders, root, folder to begin in, variables and command."""


@dataclass
class BareRoot:
    """Starts functions' processes in `images`, which are found by the name of the folder that they were made from.

    Each has `vcpu` of a processor. `groups` are their control groups.
    """

    images: Mapping[str, Image]
    vcpu: float
    root: str = field(default_factory=tempfile.mkdtemp)
    groups: list[Group] = field(default_factory=list)
    hierarchy: Groups = field(default_factory=Groups)

    def __call__(
        self, command: Sequence[str], image: Path, variables: Mapping[str, str], enter: Callable[[], None]
    ) -> "subprocess.Popen[str]":
        """As `tests.cloud_emulation.processes.Start` has it."""
        found = self.images[image.name]
        if found.user:
            raise SystemExit(f"the image wants to run as {found.user}, which clouds decide")
        group = self.hierarchy.make()
        group.limit_cpu(self.vcpu)
        self.groups.append(group)

        def into_groups() -> None:
            group.join()
            enter()

        words = ["unshare", "--mount", "--pid", "--fork", "--ipc", "--uts", "--kill-child", "bash", "-euc", _ENTER]
        values = {**found.environment, **variables}
        words += ["-", found.lower, self.root, found.folder, *(f"{name}={value}" for name, value in values.items())]
        return subprocess.Popen(
            [*words, *command],
            env={"PATH": os.environ["PATH"]},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=into_groups,
        )

    def close(self) -> None:
        """Remove the control groups and the empty folder on which roots are mounted."""
        for group in self.groups:
            group.remove()
        os.rmdir(self.root)


def memory_mb(process: int) -> tuple[int, int]:
    """The resident memory of a process and its descendants: what is theirs of it (PSS), and its anonymous part."""
    totals = {"Pss:": 0, "Pss_Anon:": 0}
    for member in (process, *_descendants(process)):
        try:
            text = Path(f"/proc/{member}/smaps_rollup").read_text()
        except OSError:  # it has ended
            continue
        for line in text.splitlines():
            name, *rest = line.split()
            if name in totals:
                totals[name] += int(rest[0])
    return totals["Pss:"] >> 10, totals["Pss_Anon:"] >> 10


def _descendants(process: int) -> list[int]:
    try:
        own = [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []
    return [*own, *(one for child in own for one in _descendants(child))]
