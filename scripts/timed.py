"""Run a command as a part of the gate and note what it took; without a command, print what all parts took.

python scripts/timed.py out/ci/times.json NAME COMMAND [ARGUMENT ...]
python scripts/timed.py out/ci/times.json
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path


def run(file: Path, name: str, command: list[str]) -> int:
    """The command's exit code; its wall and processor seconds are added to the JSON in `file`."""
    began_s = time.monotonic()
    code = subprocess.run(command).returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    part = {"wall_s": round(time.monotonic() - began_s, 1), "processor_s": round(used.ru_utime + used.ru_stime, 1)}
    file.write_text(json.dumps({**_read(file), name: part}, indent=1) + "\n")
    return code


def show(file: Path) -> None:
    """Print a line for each part, and the sum."""
    parts = _read(file)
    for name, part in parts.items():
        print(f"{name:14} {part['wall_s']:8.1f} s {part['processor_s']:8.1f} s of processor")
    wall_s, processor_s = (sum(part[unit] for part in parts.values()) for unit in ("wall_s", "processor_s"))
    print(f"{'all':14} {wall_s:8.1f} s {processor_s:8.1f} s of processor")


def _read(file: Path) -> dict[str, dict[str, float]]:
    parts: dict[str, dict[str, float]] = json.loads(file.read_text()) if file.exists() else {}
    return parts


def main() -> None:
    file, *words = sys.argv[1:]
    if words:
        sys.exit(run(Path(file), words[0], words[1:]))
    show(Path(file))


if __name__ == "__main__":
    main()
