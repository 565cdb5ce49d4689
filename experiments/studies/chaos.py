"""Two hundred runs in which things go wrong: each must end with the very bits of an undisturbed one, or say why not."""

import argparse
import json
from collections import Counter
from pathlib import Path

import torch

from funcpipe.platforms.catalog import open_storage
from funcpipe.testing.faults import Fault
from tests.support.chaos import Ending, good, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write every ending as JSON")
    parser.add_argument("--fault", choices=[fault.name.lower() for fault in Fault], help="only this one")
    parser.add_argument("--storage", metavar="URL", help="an empty storage instead of this process's memory")
    options = parser.parse_args()
    torch.set_num_threads(1)
    _, expected = run(0, Fault.NONE, None)
    assert expected is not None, "the undisturbed run fails"
    chosen = options.fault.upper() if options.fault else None
    faults = [fault for fault in Fault if fault is not Fault.NONE and chosen in (None, fault.name)]
    endings = []
    objects = open_storage(options.storage) if options.storage else None
    for seed in range(options.first_seed, options.first_seed + options.runs):
        endings.append(run(seed, faults[seed % len(faults)], expected, objects)[0])
        if endings[-1].outcome != "same bits":
            print(f"seed {seed}, {endings[-1].fault.value}: {endings[-1].error or endings[-1].outcome}", flush=True)
    show(endings)
    if options.output:
        rows = [{**{k: getattr(e, k) for k in Ending.__slots__}, "fault": e.fault.value} for e in endings]
        options.output.write_text(json.dumps(rows, indent=1) + "\n")
    if any(not good(ending) for ending in endings):
        raise SystemExit("a run hung, ended with other bits, or left something behind")


def show(endings: list[Ending]) -> None:
    outcomes = sorted({ending.outcome for ending in endings}, key=lambda name: (name != "same bits", name))
    print(f"{'fault':34} {'runs':>5} {'restarts':>9} {'longest s':>10}  " + "  ".join(outcomes))
    for fault in Fault:
        some = [ending for ending in endings if ending.fault is fault]
        if some:
            counts = Counter(ending.outcome for ending in some)
            restarts, longest_s = sum(e.restarts for e in some), max(e.seconds for e in some)
            cells = "  ".join(f"{counts[name]:>{len(name)}}" for name in outcomes)
            print(f"{fault.value:34} {len(some):>5} {restarts:>9} {longest_s:>10.1f}  {cells}")
    left = sum(e.left_objects for e in endings), sum(e.left_functions for e in endings)
    print(f"{len(endings)} runs; left behind: {left[0]} objects, {left[1]} functions")


if __name__ == "__main__":
    main()
