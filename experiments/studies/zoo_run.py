"""Run a zoo: every class in a process of its own, with a limit on its processor time."""

import argparse
import json
import multiprocessing
import resource
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.studies import zoo
from experiments.studies.zoo import MakeSpecimen, NotSamplesError

VERDICTS = ("usable", "right", "refused", "wrong", "crash", "hang", "unusable")
WALL = 10
"""How much longer than its processor time a class may take: other processes may have the processors."""

TOO_LONG = "no result within the time limit"


Judge = Callable[[str, MakeSpecimen], dict[str, Any]]


def _child(name: str, specimen: MakeSpecimen, judge: Judge, limit_s: float, result: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), int(limit_s) + 5))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    def made(name: str) -> zoo.Specimen:
        one = specimen(name)
        result.send(None)  # plain PyTorch can run it: what takes long from here on is funcpipe
        return one

    result.send(judge(name, made))


def judged(name: str, specimen: MakeSpecimen, judge: Judge, limit_s: float) -> dict[str, Any]:
    """The verdict on one class, from a process of its own, which has `limit_s` seconds of a processor."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    start = time.perf_counter()
    process = context.Process(target=_child, args=(name, specimen, judge, limit_s, sending))
    process.start()
    sending.close()
    verdict, row = "unusable", None
    try:
        while row is None and receiving.poll(WALL * limit_s):
            row = receiving.recv()
            verdict = "hang"
    except EOFError:
        process.join()
        verdict = verdict if process.exitcode == -signal.SIGXCPU else "crash"
    process.kill()
    process.join()
    if row is None:
        row = {"verdict": verdict, "why": "the process died" if verdict == "crash" else TOO_LONG}
    return {"class": name, **row, "seconds": time.perf_counter() - start}


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The counts, and the refusals by cause; classes whose inputs are not samples do not count as unusable."""
    counts = Counter(row["verdict"] for row in rows)
    usable = len(rows) - counts["unusable"]
    packed = sum(row.get("why", "").startswith(NotSamplesError.__name__) for row in rows)
    print("  ".join(f"{verdict} {counts[verdict]}" for verdict in VERDICTS), f" of {len(rows)} classes")
    print(f"unusable: {counts['unusable'] - packed} of {len(rows) - packed}; inputs of {packed} more are not samples")
    if counts["usable"]:
        return
    print(f"right: {100 * counts['right'] / max(usable, 1):.1f} % of the {usable} that plain PyTorch trains")
    print("by tracer:", dict(Counter(row["tracer"] for row in rows if row["verdict"] == "right")))
    causes = Counter(cause_of(row["why"]) for row in rows if row["verdict"] == "refused")
    for cause, count in causes.most_common(20):
        print(f"{count:5}  {cause}")


def cause_of(refusal: str) -> str:
    """A refusal without what is particular to one class: the last tracer's reason, if tracers are listed."""
    refusal = refusal.partition("\n\nTraceback")[0]
    lines = [line for line in refusal.splitlines() if line.startswith("  ")] or refusal.splitlines()
    return lines[-1].strip()[-160:]


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """A parser of the options that all zoos have; `text` tells what the zoo is."""
    description = f"{text}\n\n{zoo.__doc__}"
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="classes; without any, all")
    parser.add_argument("--every", type=int, default=1, help="only every nth class")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=180.0, help="of a processor, for one class")
    parser.add_argument("--usable", action="store_true", help="only look for what plain PyTorch can train")
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    return parser


def judge_all(names: Sequence[str], specimen: MakeSpecimen, options: argparse.Namespace) -> None:
    """Judge the classes and print the verdicts; exits with 1 if a class is trained wrong, crashes or hangs."""
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.processes) as pool:
        judge = zoo.usable if options.usable else zoo.judge
        judge_one = partial(judged, specimen=specimen, judge=judge, limit_s=options.limit_s)
        for row in pool.map(judge_one, names[:: options.every]):
            rows.append(row)
            if row["verdict"] not in ("right", "usable"):
                print(f"{row['class']}: {row['verdict']}: {row['why'].splitlines()[0][:300]}", flush=True)
            if options.output:
                options.output.write_text(json.dumps(rows, indent=1) + "\n")
    show(rows)
    if any(row["verdict"] in ("wrong", "crash", "hang") for row in rows):
        raise SystemExit("some classes are trained wrong, or end without a clear error")
