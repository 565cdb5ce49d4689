"""The GPUs of machines at hand, as the driver's tool or a cluster names them; torch is not needed to find them."""

import csv
import functools
import math
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import resources

from funcpipe.core import Plan, PlatformSpec, from_text
from funcpipe.core.accelerator import Accelerator, AcceleratorTable
from funcpipe.errors import PlatformError, PlatformRefused
from funcpipe.platforms.room import Gpu, Node, largest_first, placed_at_once

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The environment variable that says which GPUs a process may use, by number or by UUID."""

_TOOL = "nvidia-smi"
_QUERY = ("--query-gpu=index,uuid,name,memory.total,mig.mode.current", "--format=csv,noheader,nounits")
_ANSWER_S = 20.0


@functools.cache
def known_accelerators() -> AcceleratorTable:
    """Return the models whose rates are known."""
    file = resources.files("funcpipe.platforms").joinpath("specs", "accelerators", "nvidia.json")
    return from_text(AcceleratorTable, file.read_text(encoding="utf-8"), source="nvidia.json")


def usable_gpus() -> tuple[Gpu, ...]:
    """Return the NVIDIA GPUs of this machine that this process may use and whose rates are known."""
    tool = shutil.which(_TOOL)
    return () if tool is None else _asked(tool, os.environ.get(VISIBLE))


@functools.cache
def _asked(tool: str, visible: str | None) -> tuple[Gpu, ...]:
    try:
        done = subprocess.run([tool, *_QUERY], capture_output=True, text=True, timeout=_ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError):  # the tool is there, but no driver, or no device
        return ()
    return read_gpus(done.stdout, visible)


def read_gpus(text: str, visible: str | None = None) -> tuple[Gpu, ...]:
    """Return the GPUs that the tool's answer `text` lists, whose rates are known, as far as they are `visible`.

    One that is divided by MIG is left out: a process is given its instances, not the device.
    """
    rows = [[word.strip() for word in row] for row in csv.reader(text.splitlines()) if row]
    found = {}
    for index, uuid, name, memory_mb, mig in rows:
        model = model_named(name, int(memory_mb)) if memory_mb.isdecimal() and mig != "Enabled" else None
        if model is not None:
            found[index] = Gpu(model=model, free_mb=model.memory_mb, label=uuid, usd_h=hour_usd(model))
    return tuple(found[index] for index in _visible(visible, {row[0]: row[1] for row in rows}) if index in found)


def _visible(text: str | None, uuids: dict[str, str]) -> Iterable[str]:
    """Return the indexes that the environment variable names, as the driver reads it: up to the first that is wrong."""
    if text is None:
        return uuids
    named = []
    for word in map(str.strip, text.split(",")):
        index = next(
            (index for index, uuid in uuids.items() if word and (word == index or uuid.startswith(word))), None
        )
        if index is None or index in named:
            break
        named.append(index)
    return named


def model_named(name: str, memory_mb: int | None = None) -> Accelerator | None:
    """Return the model in a name such as "NVIDIA A100-SXM4-80GB", with its `memory_mb` where that was read.

    Of models with the same first word, that of the nearest memory, or the smallest. None if it is not known.
    """
    words = name.replace("-", " ").split()
    models = [model for model in known_accelerators().accelerators if model.name.partition("-")[0] in words]
    if not models:
        return None
    if memory_mb is None:
        return min(models, key=lambda model: model.memory_mb)
    nearest = min(models, key=lambda model: abs(model.memory_mb - memory_mb))
    return replace(nearest, memory_mb=memory_mb)


def hour_usd(model: Accelerator) -> float:
    """Return dollars for an hour of a machine with one such GPU."""
    return known_accelerators().usd_h[model.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionGpu:
    """What a function has of a GPU."""

    uuid: str
    memory_mb: int


def placed_on(
    gpus: Iterable[Gpu], spec: PlatformSpec, name: str, *, beside: Iterable[FunctionGpu]
) -> FunctionGpu | None:
    """Return what a new function of the size called `name` has of the first of `gpus` with room `beside` others.

    None if it has no accelerator, or torch has to find one where none is known. Raises PlatformError without room.
    """
    known = [*gpus]
    size = next((size for size in spec.sizes if size.name == name), None)
    if size is None or size.accelerator is None or not known:
        return None
    held = Counter[str]()
    for other in beside:
        held[other.uuid] += other.memory_mb
    for gpu in known:
        if replace(gpu, free_mb=gpu.free_mb - held[gpu.label]).parts_of(size):
            return FunctionGpu(uuid=gpu.label, memory_mb=size.accelerator.memory_mb)
    raise PlatformError(
        f"no {size.accelerator.name} of this machine has {size.accelerator.memory_mb} MB left for a function of "
        f"the size {name}, beside those that run"
    )


def check_room(plan: Plan, spec: PlatformSpec, gpus: Sequence[Gpu]) -> None:
    """Raise PlatformRefused unless all functions of `plan` with an accelerator have room on `gpus` at once, if there
    are some.
    """
    names = [stage.size for stage in plan.stages if spec.accelerates(stage.size) for _ in range(plan.replicas)]
    sizes = sorted((spec.size(name) for name in names), key=largest_first)
    node = Node(cpus=math.inf, memory_bytes=sum(size.memory_bytes for size in sizes), gpus=tuple(gpus))
    if gpus and placed_at_once(sizes, [node]) < len(sizes):
        wanted = " and ".join(f"{count} of {name}" for name, count in Counter(names).items())
        offered = " and ".join(f"{gpu.model.name} with {gpu.free_mb} MB" for gpu in gpus)
        raise PlatformRefused(
            f"the plan needs functions with a GPU, {wanted}, at once, and this machine has {offered}; plan fewer "
            "functions, or smaller parts of a GPU"
        )
