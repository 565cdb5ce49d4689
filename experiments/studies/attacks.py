"""Runs under attack: each must end with the bits of an undisturbed one, or with a true message whose advice works."""

import argparse
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch

from tests.support.attacks import OUTCOMES, WRONG, Attack, Ending, drawn, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--attack", choices=[attack.name.lower() for attack in Attack], help="only this one, alone")
    parser.add_argument("--output", type=Path, help="write every ending as JSON")
    parser.add_argument("--verbose", action="store_true", help="print every ending")
    options = parser.parse_args()
    torch.set_num_threads(1)
    endings = []
    for seed in range(options.first_seed, options.first_seed + options.runs):
        attacks = (Attack[options.attack.upper()],) if options.attack else drawn(seed)
        endings.append(run(seed, attacks))
        if options.verbose or endings[-1].outcome == WRONG:
            tell(endings[-1])
    show(endings)
    if options.output:
        rows = [asdict(ending) | {"attacks": [attack.value for attack in ending.attacks]} for ending in endings]
        options.output.write_text(json.dumps(rows, indent=1) + "\n")
    if any(ending.outcome == WRONG for ending in endings):
        raise SystemExit("a run ended as none may")


def tell(ending: Ending) -> None:
    """Print one ending."""
    attacks = ", ".join(attack.value for attack in ending.attacks)
    took = f"{ending.processor_s:5.2f} of {ending.seconds:5.1f} s"
    print(f"{ending.seed:4} {took}  {attacks}: {ending.outcome} {ending.wrong}", flush=True)
    for line in (*ending.errors, *([f"did: {', '.join(ending.did)}"] if ending.did else [])):
        print(f"       {line[:400]}", flush=True)


def show(endings: list[Ending]) -> None:
    """Print how many ended how, by attack."""
    print(f"{'attack':36} {'runs':>5}  " + "  ".join(OUTCOMES))
    for attack in Attack:
        some = [ending for ending in endings if attack in ending.attacks]
        if some:
            print(f"{attack.value:36} {len(some):>5}  " + _cells(some))
    print(f"{'all':36} {len(endings):>5}  " + _cells(endings))
    did = Counter(done for ending in endings for done in ending.did)
    print("done besides: " + ", ".join(f"{name} {count}" for name, count in did.most_common()))
    total_s = sum(ending.processor_s for ending in endings)
    print(f"{total_s / len(endings):.2f} processor seconds a run, {max(e.seconds for e in endings):.1f} s at most")


def _cells(endings: list[Ending]) -> str:
    counts = Counter(ending.outcome for ending in endings)
    return "  ".join(f"{counts[name]:>{len(name)}}" for name in OUTCOMES)


if __name__ == "__main__":
    main()
