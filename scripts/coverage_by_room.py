"""What the tests reach of every room of the package, from coverage's JSON report; fails below the bar.

A share counts statements and branches alike, as coverage.py does: what was reached of both, over both.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = "funcpipe"
WHOLE_PERCENT = 92.0
ROOM_PERCENT = 95.0
HELD = ("runstate", "worker", "client", "comm", "training")
"""The rooms of which `ROOM_PERCENT` must be reached."""


@dataclass
class Reached:
    """How many statements and branches there are, and how many of them were reached."""

    statements: int = 0
    statements_reached: int = 0
    branches: int = 0
    branches_reached: int = 0

    def add(self, summary: Mapping[str, Any]) -> None:
        """Count a file."""
        self.statements += summary["num_statements"]
        self.statements_reached += summary["covered_lines"]
        self.branches += summary["num_branches"]
        self.branches_reached += summary["covered_branches"]

    @property
    def branch_percent(self) -> float:
        """The share of the branches."""
        return 100.0 * self.branches_reached / max(self.branches, 1)

    @property
    def percent(self) -> float:
        """The share of statements and branches together."""
        there = self.statements + self.branches
        return 100.0 * (self.statements_reached + self.branches_reached) / max(there, 1)


def by_room(report: Mapping[str, Any]) -> dict[str, Reached]:
    """What was reached of each room; modules beside the rooms count as `funcpipe` itself."""
    rooms: dict[str, Reached] = {}
    for name, file in sorted(report["files"].items()):
        parts = Path(name).parts[Path(name).parts.index(PACKAGE) + 1 :]
        rooms.setdefault(parts[0] if len(parts) > 1 else PACKAGE, Reached()).add(file["summary"])
    return rooms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="what `coverage json` writes")
    report = json.loads(parser.parse_args().report.read_text())
    rooms, whole = by_room(report), Reached()
    whole.add(report["totals"])
    print(f"{'room':12} {'branches':>9} {'total':>9}")
    for name, reached in [*rooms.items(), ("together", whole)]:
        print(f"{name:12} {reached.branch_percent:8.1f}% {reached.percent:8.1f}%")
    low = [f"{room} {rooms[room].percent:.1f} %" for room in HELD if rooms[room].percent < ROOM_PERCENT]
    low += [f"together {whole.percent:.1f} %"] if whole.percent < WHOLE_PERCENT else []
    if low:
        raise SystemExit(
            f"too little is reached: {', '.join(low)}; {WHOLE_PERCENT:g} % of the package must be, and "
            f"{ROOM_PERCENT:g} % of {', '.join(HELD)}"
        )


if __name__ == "__main__":
    main()
