"""What befalls the functions of a simulated step, from the options of the command line."""

import argparse
import re

from funcpipe.core import PlatformSpec
from funcpipe.errors import InputError
from funcpipe.scheduler.simulator.disturbances import Disturbances, Failure, Worker

_NUMBER = r"\d+(?:\.\d*)?"


def disturbances(options: argparse.Namespace, spec: PlatformSpec) -> Disturbances:
    """Raises InputError for a straggler or a death that cannot be read."""
    return Disturbances(
        compute_jitter=options.compute_jitter,
        transfer_jitter=options.transfer_jitter,
        cold_start_s=spec.cold_start_s if options.cold else 0.0,
        seed=options.seed,
        stragglers=dict(_of_worker("--straggler", text, "=") for text in options.straggler),
        failures=tuple(
            Failure(worker=worker, at_s=at_s, restart_s=spec.cold_start_s)
            for worker, at_s in (_of_worker("--death", text, "@") for text in options.death)
        ),
    )


def _of_worker(option: str, text: str, sign: str) -> tuple[Worker, float]:
    match = re.fullmatch(rf"s(\d+)\.r(\d+){sign}({_NUMBER})", text, re.ASCII)
    if match is None:
        raise InputError(f"{option} takes a worker and a number, as in s0.r1{sign}2.5, got {text!r}")
    return (int(match[1]), int(match[2])), float(match[3])
