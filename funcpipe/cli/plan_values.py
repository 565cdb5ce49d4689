"""The values that planning and simulating take, from options.

Each function raises InputError for what it cannot read.
"""

import argparse
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from funcpipe.core import (
    Coupled,
    ModelProfile,
    Numerics,
    OptimizerKind,
    Plan,
    PlanRequest,
    PlatformSpec,
    Recompute,
    ScheduleKind,
    Stores,
    Sync,
    TrainingSpec,
    Wire,
    read,
)
from funcpipe.errors import InputError
from funcpipe.platforms.catalog import load_spec

if TYPE_CHECKING:
    from funcpipe.core import Pins
    from funcpipe.scheduler.simulator.disturbances import Disturbances, Worker

_NUMBER = r"\d+(?:\.\d*)?"


def platform_spec(options: argparse.Namespace, measured: ModelProfile) -> PlatformSpec:
    """The platform that was named, or the profile's."""
    return load_spec(options.spec or options.platform or measured.platform)


def training_spec(options: argparse.Namespace, global_batch: int) -> TrainingSpec:
    """The training to plan for, with the goal."""
    return TrainingSpec(
        global_batch=global_batch,
        optimizer=OptimizerKind(options.optimizer),
        wire=Wire(options.wire),
        recompute=Recompute(options.recompute),
        wire_back=None if options.wire_back == "same" else Wire(options.wire_back),
        wire_sync=Wire(options.wire_sync),
        numerics=Numerics(options.numerics),
        schedule=None if options.schedule == "auto" else ScheduleKind(options.schedule),
        sync=None if options.sync == "auto" else Sync(options.sync),
        shard_optimizer=options.shard_optimizer,
        stores=_stores(options.stores),
        averaged=options.averaged,
        joint_loss=options.coupled == Coupled.CACHE.value,
        replicas=_degrees(options.replicas),
        **_goal(options),
    )


def made_from(options: argparse.Namespace, plan: Plan) -> PlanRequest:
    """The request of `plan`, with the changes of the options."""
    request = plan.request
    if request is None and options.profile is None:
        raise InputError(
            f"{options.plan} does not say what it was chosen from, as plans by hand and of earlier versions: "
            "name the profile with --profile FILE"
        )
    if request is None or options.profile is not None:
        profile = read(ModelProfile, options.profile)
        if request is None or request.profile.platform != profile.platform:
            return PlanRequest(profile=profile, spec=platform_spec(options, profile))
        request = replace(request, profile=profile)
    if options.spec or options.platform:
        request = replace(request, spec=platform_spec(options, request.profile))
    return request


def explained_spec(plan: Plan) -> TrainingSpec:
    """The training that `plan` was made for; without a request, as far as the plan has it."""
    return plan.made_for or TrainingSpec(
        global_batch=plan.global_batch,
        optimizer=plan.optimizer,
        wire=plan.wire,
        wire_back=plan.wire_back,
        wire_sync=plan.wire_sync,
        shard_optimizer=plan.shard_optimizer,
        joint_loss=plan.joint_loss,
    )


def _stores(text: str) -> Stores:
    """The stores that plans may use: a word for all kinds, or the store of some of them."""
    if "=" not in text:
        return Stores.of(text)
    pairs = [part.partition("=") for part in text.split(",")]
    return Stores.of({kind.strip(): name.strip() for kind, _, name in pairs})


def _goal(options: argparse.Namespace) -> dict[str, Any]:
    """The goal of the plan; deadline and budget are those of one iteration."""
    return {
        "time_value": options.time_value or 0.0,
        "deadline_s": None if options.deadline is None else options.deadline / options.iterations,
        "budget_usd": None if options.budget is None else options.budget / options.iterations,
    }


def pins(options: argparse.Namespace) -> "Pins":
    """The decisions that the plan must follow."""
    from funcpipe.core import Pins

    sizes = {}
    for text in options.size:
        layer, equals, size = text.partition("=")
        if not equals:
            raise InputError(f"--size takes LAYER=SIZE, got {text!r}")
        sizes[layer] = size
    return Pins(
        cuts=tuple(options.cut),
        together=tuple(tuple(group.split(",")) for group in options.together),
        sizes=sizes,
        memory_mb=options.memory,
        max_memory_mb=options.max_memory,
        max_functions=options.max_functions,
    )


def disturbances(options: argparse.Namespace, spec: PlatformSpec) -> "Disturbances":
    """The disturbances of the simulated step."""
    from funcpipe.scheduler.simulator.disturbances import Disturbances, Failure

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


def _of_worker(option: str, text: str, sign: str) -> "tuple[Worker, float]":
    match = re.fullmatch(rf"s(\d+)\.r(\d+){sign}({_NUMBER})", text, re.ASCII)
    if match is None:
        raise InputError(f"{option} takes a worker and a number, as in s0.r1{sign}2.5, got {text!r}")
    return (int(match[1]), int(match[2])), float(match[3])


def _degrees(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--replicas takes whole numbers separated by commas, got {text!r}") from None
