"""Explores in which orders functions and clients of a run can meet, and prints what was explored and what is broken."""

import argparse
import time
from dataclasses import replace

from funcpipe.testing.client_scenarios import SCENARIOS as CLIENTS
from funcpipe.testing.interleaving import Violation, explore
from funcpipe.testing.race_scenarios import SCENARIOS as RACES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", default="", help="only scenarios with this in their name")
    parser.add_argument("--switches", type=int, help="how often an actor may be left that could go on")
    parser.add_argument("--until-violation", action="store_true", help="stop at the first one")
    options = parser.parse_args()
    print(f"{'scenario':72} {'actors':>6} {'switches':>8} {'states':>9} {'steps':>9} {'interleavings':>16} {'s':>6}")
    broken: list[Violation] = []
    for scenario in (*RACES, *CLIENTS):
        if options.scenario not in scenario.name:
            continue
        bounded = scenario if options.switches is None else replace(scenario, switches=options.switches)
        began_s = time.monotonic()
        found = explore(bounded, until_violation=options.until_violation)
        switches = "any" if bounded.switches is None else bounded.switches
        print(
            f"{scenario.name:72} {len(scenario.actors):>6} {switches:>8} {found.states:>9,} {found.steps:>9,} "
            f"{found.interleavings:>16,} {time.monotonic() - began_s:>6.1f}",
            flush=True,
        )
        broken += found.violations
    for violation in broken:
        print(f"\n{violation}")
    print(f"\n{len(broken)} violations")
    if broken:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
