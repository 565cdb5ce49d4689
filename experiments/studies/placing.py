"""How often the place that `fit` takes is the best in hindsight: a simulated month of jobs, and STOIC's 92 %.

Jobs of eight models, twenty a day, may run on this machine, on functions, or on functions with a GPU. What a place
really takes is what is predicted times a factor of its own for each model, which nobody knows before a run has shown
it, and times the noise of each run. A job has a deadline, or its hours are worth something, or it is to be cheap. The
choice is the product's: its corrections by the history, and its rule. Hindsight knows what the job took at all places.

    python -m experiments.studies.placing
"""

import argparse
import json
import math
import random
from dataclasses import replace
from statistics import mean

from funcpipe.core import Observation, Quantity
from funcpipe.core.history import ComparedWay, Comparison
from funcpipe.core.provision import JobSpec
from funcpipe.neighbours.history.hindsight import OBSERVED, KnownWay, corrected_way, recommended
from funcpipe.neighbours.history.journal import History

PLACES = {"local": (1.0, 0.02, 0.3), "aws-lambda": (0.15, 0.9, 6.0), "gpu-functions": (0.05, 1.2, 20.0)}
"""Of each place the seconds of a step beside those on this machine, dollars an hour, and the seconds of a start."""

MODELS, WEEKS, JOBS_A_WEEK = 8, 4, 140
OFF, NOISE = 0.4, 0.05
"""Standard deviations of ln(factor) of places and models, and of runs: factors of 1.5 are usual, those of 2.2 rare."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--off", type=float, default=OFF, help="standard deviation of ln(factor) of places and models")
    options = parser.parse_args()
    for corrects in (False, True):
        months = [month(seed, off=options.off, corrects=corrects) for seed in range(options.seeds)]
        found = [mean(week) for week in zip(*months, strict=True)]
        told = {
            "predictions": "corrected" if corrects else "as modelled",
            "weeks, %": [round(100 * x, 1) for x in found],
        }
        print(json.dumps(told | {"month, %": round(100 * mean(found), 1)}))


def month(seed: int, *, off: float, corrects: bool) -> list[float]:
    """The share of jobs, week by week, whose place was the best in hindsight."""
    draw = random.Random(seed)
    factors = {(place, model): math.exp(draw.gauss(0, off)) for place in PLACES for model in range(MODELS)}
    observations, right = list[Observation](), list[bool]()
    for number in range(WEEKS * JOBS_A_WEEK):
        model = draw.randrange(MODELS)
        comparison = job_of(draw, model)
        history = History(observations=tuple(observations)) if corrects else History()
        known = [corrected_way(way, history, comparison.model) for way in comparison.ways]
        took = [as_it_was(way, factors[way.place, model] * math.exp(draw.gauss(0, NOISE))) for way in comparison.ways]
        chosen, _ = recommended(comparison, known)
        best, _ = recommended(comparison, took)
        right.append(chosen == best)
        (way,) = [way for way in comparison.ways if way.way == chosen]
        (run,) = [one for one in took if one.way == chosen]
        observations.append(observed(way, run, comparison.model, number))
    return [mean(right[first : first + JOBS_A_WEEK]) for first in range(0, len(right), JOBS_A_WEEK)]


def job_of(draw: random.Random, model: int) -> Comparison:
    """A job of a model, with what is predicted for each place; a day's work here at most."""
    step_s = 0.05 * 2**model
    steps = round(math.exp(draw.uniform(math.log(60), math.log(24 * 3600))) / step_s) + 1
    wish = draw.choice(["cheap", "worth", "deadline"])
    here_s = steps * step_s
    job = JobSpec(samples=steps, global_batch=1, epochs=1)
    if wish == "worth":
        job = replace(job, time_value=draw.uniform(0.1, 10))
    elif wish == "deadline":
        job = replace(job, deadline_s=here_s * math.exp(draw.uniform(math.log(0.1), math.log(3))) + 60)
    ways = tuple(
        ComparedWay(
            way=place,
            key=place,
            rented="",
            place=place,
            seconds=start_s + here_s * share,
            usd=(start_s + here_s * share) / 3600 * usd_h,
            iterations=steps,
            start_s=start_s,
            sizes="one",
        )
        for place, (share, usd_h, start_s) in PLACES.items()
    )
    return Comparison(
        key="", job=job, model=f"model-{model}", platform="", market="", ways=ways, recommended=None, at_s=0.0
    )


def as_it_was(way: ComparedWay, factor: float) -> KnownWay:
    """What the job takes at a place in truth."""
    seconds = way.start_s + factor * (way.seconds - way.start_s)
    return KnownWay(way=way.way, seconds=seconds, usd=way.usd * seconds / way.seconds, basis=OBSERVED)


def observed(way: ComparedWay, run: KnownWay, model: str, number: int) -> Observation:
    """What a run teaches: how long its iterations took."""
    return Observation(
        run=f"run-{number}",
        platform=way.place,
        ran_on=way.place,
        size=way.sizes,
        model=model,
        quantity=Quantity.ITERATION,
        predicted_s=(way.seconds - way.start_s) / way.iterations,
        observed_s=(run.seconds - way.start_s) / way.iterations,
        at_s=float(number),
    )


if __name__ == "__main__":
    main()
