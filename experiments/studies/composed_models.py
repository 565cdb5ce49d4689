"""Random models of many features: is each trained as plain PyTorch trains it, or refused?

    python -m experiments.studies.composed_models --seeds 2000
    python -m experiments.studies.composed_models --seed 17 --shrink

`tests/model/graph/composed/judge.py` says how a model is drawn from a seed, trained and judged; each has a process of
its own. What is not equal or refused is a bug; `--shrink` looks for the smallest model that shows it.
"""

import argparse
import contextlib
import json
import multiprocessing
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.model.graph.composed.judge import Recipe, Verdict, judge, recipe, simpler

BUGS = ("wrong", "crash", "hang")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000, help="how many models")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this model alone")
    parser.add_argument("--shrink", action="store_true", help="for each bug, find the smallest model that shows it")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=60.0, help="for one model")
    parser.add_argument("--output", type=Path, help="write the verdicts as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(options.first, options.first + options.seeds) if options.seed is None else [options.seed]
    started_s = time.monotonic()
    found: dict[int, Verdict] = {}
    with ThreadPoolExecutor(options.processes) as pool:
        verdicts = pool.map(lambda seed: judged(recipe(seed), seed, options.limit_s), seeds)
        for seed, verdict in zip(seeds, verdicts, strict=True):
            found[seed] = verdict
            if verdict.kind in BUGS or options.seed is not None:
                print(f"--seed {seed}: {_line(verdict)}", flush=True)
                if options.shrink:
                    smallest = shrunk(verdict, partial(judged, seed=seed, limit_s=options.limit_s))
                    print(f"    smallest: {_line(smallest)}", flush=True)
    show(list(found.values()), time.monotonic() - started_s)
    if options.output:
        rows = [{"seed": seed, **asdict(verdict)} for seed, verdict in found.items()]
        options.output.write_text(json.dumps(rows, indent=1) + "\n")
    if any(verdict.kind in BUGS for verdict in found.values()):
        raise SystemExit("some models are trained wrong, or end without a clear error")


def judged(made: Recipe, seed: int, limit_s: float) -> Verdict:
    """The verdict on one model, from a process of its own."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(made, seed, sending))
    process.start()
    sending.close()
    verdict = Verdict("hang", f"no result within {limit_s:.0f} s", made)
    with contextlib.suppress(EOFError):
        if receiving.poll(limit_s):
            verdict = Verdict("crash", "the process died", made)
            verdict = receiving.recv()
    process.kill()
    process.join()
    return verdict


def _child(made: Recipe, seed: int, result: Any) -> None:
    torch.set_num_threads(1)
    result.send(judge(made, seed))


def shrunk(verdict: Verdict, judge_again: Callable[[Recipe], Verdict]) -> Verdict:
    """The verdict on the smallest model with the same kind of bug that leaving things out leads to."""
    for smaller in simpler(verdict.recipe):
        again = judge_again(smaller)
        if again.kind == verdict.kind:
            return shrunk(again, judge_again)
    return verdict


def _line(verdict: Verdict) -> str:
    made, why = verdict.recipe, verdict.why.strip().splitlines() or [""]
    features = [*made.parts, f"output {made.output}", f"lengths {made.lengths}", f"replicas {made.replicas}"]
    features += [f"skips {made.skips}"] * bool(made.skips) + [f"tied {made.tied}"] * (made.tied is not None)
    return f"{verdict.kind} ({verdict.tracer}): {', '.join(features)}: {why[-1 if verdict.kind == 'crash' else 0]}"


def show(verdicts: Sequence[Verdict], seconds: float) -> None:
    """The counts, and the refusals by cause."""
    kinds = Counter(verdict.kind for verdict in verdicts)
    counts = "  ".join(f"{kind} {kinds[kind]}" for kind in ("equal", "refused", *BUGS, "unusable"))
    print(f"{counts}  of {len(verdicts)} models in {seconds:.0f} s")
    causes = Counter(_cause(verdict.why) for verdict in verdicts if verdict.kind == "refused")
    for cause, count in causes.most_common(20):
        print(f"{count:5}  {cause}")


def _cause(refusal: str) -> str:
    """A refusal without what is particular to one model: the last tracer's reason, if tracers are listed."""
    refusal = refusal.partition("\n\nTraceback")[0]
    lines = [line for line in refusal.splitlines() if line.startswith("  ")] or refusal.splitlines()[:1]
    return re.sub(r"run run-[\w-]+: |parts\.\d+(\.\w+)?|\d+", "…", lines[-1].strip())[:160]


if __name__ == "__main__":
    main()
