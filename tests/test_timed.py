"""The parts of the gate that ran side by side are all noted, and take together what passed."""

import json
import subprocess
import sys
from pathlib import Path

from scripts import timed

SCRIPT = [sys.executable, timed.__file__]


def test_no_part_that_ends_beside_others_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    names = ["a", "b", "c", "d"]
    commands = [
        [*SCRIPT, str(file), name, sys.executable, "-c", f"raise SystemExit({name == 'c':d})"] for name in names
    ]
    running = [subprocess.Popen(command) for command in commands]
    assert [process.wait() for process in running] == [0, 0, 1, 0]
    assert sorted(json.loads(file.read_text())) == names


def test_parts_are_shown_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    parts = {
        "tests": {"began_s": 110.0, "wall_s": 30.0, "processor_s": 50.0},
        "setup": {"began_s": 100.0, "wall_s": 10.0, "processor_s": 9.0},
        "types": {"began_s": 110.5, "wall_s": 20.0, "processor_s": 20.0},
    }
    file.write_text(json.dumps(parts))
    shown = subprocess.run([*SCRIPT, file], check=True, capture_output=True, text=True).stdout
    assert [line.split()[0] for line in shown.splitlines()] == ["setup", "tests", "types", "all"]
    assert shown.splitlines()[-1].split()[1:4:2] == ["40.0", "79.0"]
