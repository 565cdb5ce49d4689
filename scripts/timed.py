"""Run a command as a part of the gate and note what it took; without a command, print what all parts took.

python scripts/timed.py out/ci/times.json NAME COMMAND [ARGUMENT ...]
python scripts/timed.py out/ci/times.json

Parts may run side by side: they take less time together than one by one.
"""

import fcntl
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def run(file: Path, name: str, command: list[str]) -> int:
    """The command's exit code; when it began, its wall and processor seconds are added to the JSON in `file`."""
    began_s = time.time()
    code = subprocess.run(command).returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    part = {
        "began_s": round(began_s, 1),
        "wall_s": round(time.time() - began_s, 1),
        "processor_s": round(used.ru_utime + used.ru_stime, 1),
    }
    with os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT), "r+") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        parts: dict[str, Any] = json.loads(opened.read() or "{}")
        opened.seek(0)
        opened.truncate()
        opened.write(json.dumps({**parts, name: part}, indent=1) + "\n")
    return code


def show(file: Path) -> None:
    """Print a line for each part, in the order in which they began, and what they took together."""
    parts: dict[str, dict[str, float]] = json.loads(file.read_text()) if file.exists() else {}
    for name, part in sorted(parts.items(), key=lambda item: item[1]["began_s"]):
        print(f"{name:14} {part['wall_s']:8.1f} s {part['processor_s']:8.1f} s of processor")
    ended_s = max((part["began_s"] + part["wall_s"] for part in parts.values()), default=0.0)
    wall_s = ended_s - min((part["began_s"] for part in parts.values()), default=0.0)
    print(f"{'all':14} {wall_s:8.1f} s {sum(part['processor_s'] for part in parts.values()):8.1f} s of processor")


def main() -> None:
    file, *words = sys.argv[1:]
    if words:
        sys.exit(run(Path(file), words[0], words[1:]))
    show(Path(file))


if __name__ == "__main__":
    main()
