"""What the demo's job would take on a cloud, planned from the profile that was made on this machine."""

from collections.abc import Iterator
from dataclasses import replace

from funcpipe.client.prepare.job_estimate import estimate_job
from funcpipe.client.prepare.job_shape import job_shape
from funcpipe.core import FaultTolerance, JobEstimate, ModelProfile, Plan, PlatformSpec, TrainingSpec
from funcpipe.partitioner.optimize import optimize
from funcpipe.platforms.catalog import load_spec
from funcpipe.profiler.measure import base_memory_bytes

CLOUDS = {"AWS Lambda": "aws-lambda", "Alibaba FC": "aliyun-fc"}


def estimates(
    profile: ModelProfile, plan: Plan, *, samples: int, epochs: int
) -> Iterator[tuple[str, Plan, JobEstimate]]:
    """For each cloud by its built-in specification, the best plan for the job of `plan`, and what all of it would take.

    These plans are free to cut and to replicate as they like: what the demo pins is not asked for there.
    """
    wanted = plan.made_for or TrainingSpec(global_batch=plan.global_batch, optimizer=plan.optimizer)
    for cloud, name in CLOUDS.items():
        spec = load_spec(name)
        best = optimize(scaled(profile, spec), spec, wanted)
        yield cloud, best, estimate_job(best, job_shape(best, samples, epochs), faults=FaultTolerance(), prices=spec)


def scaled(profile: ModelProfile, spec: PlatformSpec) -> ModelProfile:
    """A profile of this machine's processors for functions of `spec`: times are divided by the vCPUs of each size.

    Memory is that of a function which imports torch itself, where local ones are forked from a process that has.
    """
    vcpus = [size.vcpu for size in spec.sizes]
    layers = tuple(
        replace(
            layer,
            forward_s=tuple(layer.forward_s[-1] / vcpu for vcpu in vcpus),
            backward_s=tuple(layer.backward_s[-1] / vcpu for vcpu in vcpus),
        )
        for layer in profile.layers
    )
    there_bytes = spec.base_memory_bytes or base_memory_bytes(forked=False)
    return replace(
        profile,
        platform=spec.name,
        sizes=tuple(size.name for size in spec.sizes),
        layers=layers,
        base_memory_bytes=profile.base_memory_bytes + there_bytes - base_memory_bytes(forked=True),
        estimated=True,
    )
