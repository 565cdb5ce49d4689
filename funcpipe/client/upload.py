"""What functions find in the storage when they start: the code and the tensors of their stages."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from funcpipe.client.job import Job
from funcpipe.comm import codec
from funcpipe.core import (
    Life,
    Routes,
    TensorProfile,
    TiedParameter,
    WorkerSpec,
    find_routes,
    prices_of,
    stages_of_layers,
)
from funcpipe.model.graph import LayerGraph
from funcpipe.model.split import StageModule, dump_stage, split, stage_bounds
from funcpipe.platforms.base import Storage
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.resume import Resumed
from funcpipe.training.sharding import check_sharding
from funcpipe.training.stage_job import StageJob
from funcpipe.training.state import select


def upload(
    job: Job,
    keys: Keys,
    storage: Storage,
    storage_url: str,
    platform_url: str,
    *,
    life: Life | None = None,
    resumed: Resumed | None = None,
) -> Iterator[WorkerSpec]:
    """Put every stage's code and tensors, and what it had learned; yields each worker's payload, stage by stage."""
    bounds = stage_bounds(job.graph, job.plan)
    routes = _routes(job.graph, stages_of_layers(bounds))
    if job.plan.is_sharded:
        check_sharding(job.optimizer, routes)
    stages = split(job.graph, bounds)
    lives = _lives(job, life or Life(), resumed)
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
            Checkpoints(storage, keys).save(number, resumed.step, select(resumed.state, stage), writer="resumed")
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
                life=lives[number],
            )


def _lives(job: Job, life: Life, resumed: Resumed | None) -> list[Life]:
    """The life of the workers of each stage, with what they cost."""
    usd_s = prices_of(job.plan, job.prices).function_usd_s
    if resumed is not None:
        life = replace(life, spent_usd=resumed.spent_usd, elapsed_s=resumed.elapsed_s)
    return [replace(life, usd_s=own_usd_s, run_usd_s=sum(usd_s) * job.plan.replicas) for own_usd_s in usd_s]


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
