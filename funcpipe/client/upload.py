"""What functions find in the storage when they start: the code and the tensors of their stages."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from funcpipe.client.job import DEFAULT_FAULTS, NO_LIMITS, Job
from funcpipe.comm import codec
from funcpipe.core import (
    FaultTolerance,
    Routes,
    RunAccount,
    RunLimits,
    TensorProfile,
    TiedParameter,
    WorkerSpec,
    find_routes,
    logs,
    prices_of,
)
from funcpipe.model.graph import LayerGraph
from funcpipe.model.split import StageModule, dump_stage, split, stage_bounds
from funcpipe.platforms.base import Storage
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.resume import ResumePoint
from funcpipe.training.sharding import check_sharding
from funcpipe.training.stage_job import StageJob
from funcpipe.training.state import select_for_stage


def upload(
    job: Job,
    keys: Keys,
    storage: Storage,
    storage_url: str,
    platform_url: str,
    *,
    faults: FaultTolerance = DEFAULT_FAULTS,
    limits: RunLimits = NO_LIMITS,
    resumed: ResumePoint | None = None,
) -> Iterator[WorkerSpec]:
    """Put every stage's code and tensors, and what it had learned; yields each worker's payload, stage by stage."""
    bounds = stage_bounds(job.graph, job.plan)
    stage_of_layer = [stage for stage, (first, stop) in enumerate(bounds) for _ in range(first, stop)]
    routes = _routes(job.graph, stage_of_layer)
    if job.plan.is_sharded:
        check_sharding(job.optimizer, routes)
    stages = split(job.graph, bounds)
    accounts = _accounts(job, resumed)
    log_level = logs.wanted_in_functions()
    for number, stage in enumerate(stages):
        stage_job = StageJob(
            routes=routes,
            signature=job.graph.signature,
            loss=job.loss,
            optimizer=job.optimizer,
            dataset=job.dataset if _reads_data(stage) else None,
            samples=job.samples,
            shuffle=job.shuffle,
            clip_grad_norm=job.clip_grad_norm,
        )
        bundle, tensors = dump_stage(stage, stage_job)
        storage.put(keys.bundle(number), bundle)
        storage.put(keys.parameters(number), codec.encode(tensors))
        if resumed is not None and resumed.state is not None:
            Checkpoints(storage, keys).save(
                number, resumed.step, select_for_stage(resumed.state, stage), writer="resumed"
            )
        for replica in range(job.plan.replicas):
            yield WorkerSpec(
                run=keys.run,
                generation=keys.generation,
                attempt=0,
                stage=number,
                replica=replica,
                plan=replace(job.plan, estimate=None, solver=None),
                storage=storage_url,
                platform=platform_url,
                bundle=keys.bundle(number),
                bundle_sha256=hashlib.sha256(bundle).hexdigest(),
                parameters=keys.parameters(number),
                epochs=job.epochs,
                seed=job.seed,
                message_deadline_s=job.message_deadline_s,
                first_step=resumed.step if resumed is not None else 0,
                faults=faults,
                limits=limits,
                account=accounts[number],
                log_level=log_level,
            )


def _accounts(job: Job, resumed: ResumePoint | None) -> list[RunAccount]:
    """What the run has cost and taken so far, and what it costs a second, for the functions of each stage."""
    usd_s = prices_of(job.plan, job.prices).function_usd_s
    return [
        RunAccount(
            spent_usd=resumed.spent_usd if resumed is not None else 0.0,
            elapsed_s=resumed.elapsed_s if resumed is not None else 0.0,
            run_usd_s=sum(usd_s) * job.plan.replicas,
            usd_s=own_usd_s,
        )
        for own_usd_s in usd_s
    ]


def _reads_data(stage: StageModule) -> bool:
    return bool(stage.inputs) or stage.is_last


def _routes(graph: LayerGraph, stage_of_layer: Sequence[int]) -> Routes:
    tensors = [
        TensorProfile(
            name=value.name,
            producer=value.producer,
            consumers=value.consumers,
            forward_bytes=value.bytes,
            backward_bytes=value.bytes if value.differentiable else 0,
        )
        for value in graph.values
    ]
    ties = [TiedParameter(name=tie.names[0], layers=tie.layers, parameter_bytes=tie.bytes) for tie in graph.ties]
    return find_routes(stage_of_layer, tensors, ties)
