"""Is every architecture of a package that nobody here wrote trained right, or refused?

`zoo_transformers` and `zoo_timm` run this. Each class, as small as it gets, is traced, cut in three and trained for two
steps by functions that are threads of a process, and by plain PyTorch on the same micro-batches. A class is

    right      if both reach the same parameters, but for rounding;
    refused    if funcpipe says, before the first step, why it cannot train it;
    wrong      if they differ;
    crash      if anything but an error of funcpipe's own is raised;
    hang       if it takes longer than the time limit;
    unusable   if plain PyTorch cannot train it on the inputs found here.
"""

import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.client.follow.launch import launch
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import OptimizerKind, Plan, ScheduleKind, Sync, Wire
from funcpipe.errors import InputError
from funcpipe.model.graph import LayerGraph, trace
from funcpipe.model.graph.equivalence import check_batch_sizes
from funcpipe.model.tensors import flatten, load_tensors
from funcpipe.platforms.catalog import load_spec
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform, one_at_a_time
from funcpipe.training.data import load_batch
from funcpipe.training.plain import train_in_one_process
from funcpipe.training.plain_loop import detached_copy
from funcpipe.training.recipe import Recipe
from tests.support.plans import even_stages

BATCH, STAGES, MICRO_BATCH, GLOBAL_BATCH, SEED = 8, 3, 2, 4, 0
MAX_PARAMETERS = 40_000_000
optimizer = partial(torch.optim.SGD, lr=0.01)


@dataclass(frozen=True)
class Specimen:
    """A small model in training mode, and `BATCH` samples of its inputs by name."""

    model: nn.Module
    inputs: Mapping[str, Tensor]
    several: bool = False
    """Whether it must not be given a batch of one sample."""


class NotSamplesError(ValueError):
    """The inputs of a class cannot be cut along their first dimension into samples: it is not trained by batches."""


MakeSpecimen = Callable[[str], Specimen]


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The first `count` samples of a specimen."""

    def __init__(self, inputs: dict[str, Tensor], count: int) -> None:
        self._inputs = inputs
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self._inputs.items()}


@cache
def declare_torchvision() -> torch.library.Library:
    """Declare torchvision's compiled operators that are missing, for as long as the library that is returned lasts.

    They exist for some builds of torch only; torchvision is not imported without them, nor `timm` and `transformers`
    where it is installed. No architecture calls them.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            library.define(f"{operator}() -> ()")  # type: ignore[no-untyped-call]
    return library


def accepted(model: nn.Module, candidates: Iterable[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """The first of the candidates that the model runs forward and backward on; raises the first error if none is."""
    error: Exception | None = None
    for inputs in candidates:
        try:
            torch.autograd.backward(loss_of(model(**{name: tensor[:2] for name, tensor in inputs.items()})))
        except Exception as problem:  # noqa: BLE001 - whatever a class says of inputs that it does not want
            error = error or problem
            continue
        finally:
            model.zero_grad()
        return inputs
    raise error or ValueError("no inputs are known for it")


def loss_of(output: Any, target: Any = None) -> Tensor:
    """A loss that every floating part of the output that can be trained has its share in."""
    leaves = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    leaves = [leaf.abs() if leaf.is_complex() else leaf for leaf in leaves]
    parts = [leaf.double().square().mean() for leaf in leaves if leaf.numel()]
    if not parts:
        raise ValueError("no part of the output can be trained")
    return torch.stack(parts).sum()


def usable(name: str, specimen: MakeSpecimen) -> dict[str, Any]:
    """Whether there is a specimen of the class that plain PyTorch trains, and what it is; funcpipe does nothing."""
    try:
        made = specimen(name)
    except Exception as error:  # noqa: BLE001 - whatever plain PyTorch says
        return {"verdict": "unusable", "why": _first_line(error)}
    start = time.process_time()
    torch.autograd.backward(loss_of(made.model(**{key: tensor[:MICRO_BATCH] for key, tensor in made.inputs.items()})))
    return {
        "verdict": "usable",
        "step_s": time.process_time() - start,
        "parameters": sum(parameter.numel() for parameter in made.model.parameters()),
        "inputs": {name: list(tensor.shape) for name, tensor in made.inputs.items()},
    }


def judge(name: str, specimen: MakeSpecimen) -> dict[str, Any]:
    """One class: its verdict, why, and how it was traced."""
    try:
        made = specimen(name)
    except Exception as error:  # noqa: BLE001 - whatever plain PyTorch says
        return {"verdict": "unusable", "why": _first_line(error)}
    row: dict[str, Any] = {}
    try:
        return {"verdict": "right", **_trained(made, row), **row}
    except InputError as error:  # others are raised once functions run
        return {"verdict": "refused", "why": str(error), **row}
    except AssertionError as error:
        return {"verdict": "wrong", "why": str(error), **row}
    except Exception as error:  # noqa: BLE001 - a crash is what is looked for
        return {"verdict": "crash", "why": _first_line(error), "traceback": traceback.format_exc()[-2000:], **row}


def _trained(made: Specimen, row: dict[str, Any]) -> dict[str, Any]:
    """Train it both ways; raises AssertionError if the results differ."""
    data = Rows(dict(made.inputs), BATCH - 1 if not made.several and _takes_one_sample(made) else BATCH)
    first = load_batch(data, range(MICRO_BATCH))
    start = time.perf_counter()
    graph = trace(made.model, first.args, first.kwargs)
    row |= {"trace_s": time.perf_counter() - start, "tracer": graph.tracer, "layers": len(graph.layers)}
    row["notes"] = list(graph.notes)
    before = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    job = _job(graph, data)
    check_batch_sizes(graph, made.model, graph.signature.bind(first.args, first.kwargs), job.batches.micro_batch_sizes)
    steps = list(job.batches.epoch(0))
    train = partial(train_in_one_process, made.model, graph, data, steps, recipe=job.recipe, seed=SEED)
    in_order = bool(graph.carried.names)  # what a forward leaves for the next one would reach others in reverse order
    expected, control = train().state_dict(), train(reverse=not in_order).state_dict()
    site = Site(ThreadPlatform(load_spec("local"), storage := MemoryStorage()), storage, "memory://")
    with one_at_a_time():
        result = launch(prepare(job, session_on(site)))
    trained = detached_copy(made.model)
    load_tensors(trained, result.tensors)
    found = trained.state_dict()
    largest = max(float((expected[name] - tensor).abs().max()) for name, tensor in before.items() if _counts(tensor))
    for name, tensor in expected.items():
        problem = difference(found[name], tensor, control[name], before[name], largest)
        assert problem is None, f"{name}: {problem}"
    return {}


def difference(found: Tensor, expected: Tensor, control: Tensor, before: Tensor, largest: float) -> str | None:
    """How far a trained tensor is off, if that is more than rounding explains.

    `control` is what plain PyTorch reaches when it adds up the micro-batches in reverse order, `before` the untrained
    tensor. What counts is the change by training, of which `largest` is that of all tensors: a gradient that is nothing
    but rounding, such as that of the bias of attention's keys, is compared with that.
    """
    if not expected.numel() or torch.equal(found, expected):
        return None
    if not _counts(expected):
        return "other integers"
    off = float((found - expected).abs().max())
    moved = float((expected - before).abs().max())
    noise = float((control - expected).abs().max())
    allowed = max(1e-3 * moved, 20 * noise, 1e-6 * largest, 1e-6 * float(expected.abs().max()))
    return None if off <= allowed else f"off by {off:.1e}, moved by {moved:.1e}, rounding {noise:.1e}"


def _counts(tensor: Tensor) -> bool:
    return bool(tensor.numel()) and (tensor.is_floating_point() or tensor.is_complex())


def _takes_one_sample(made: Specimen) -> bool:
    """Whether the model trains on a single sample; BatchNorm on vectors does not."""
    try:
        loss_of(made.model(**{name: tensor[:1] for name, tensor in made.inputs.items()}))
    except Exception:  # noqa: BLE001 - whatever the model says
        return False
    return True


def _job(graph: LayerGraph, data: Rows) -> Job:
    names = [layer.name for layer in graph.layers]
    plan = Plan(
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        replicas=1,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        optimizer=OptimizerKind.SGD,
        model=graph.name,
        platform="local",
        stages=even_stages(names, min(STAGES, len(names))),
    )
    return Job(
        graph=graph,
        plan=plan,
        recipe=Recipe(loss=loss_of, optimizer=optimizer),
        dataset=lambda: data,
        samples=len(data),
        epochs=1,
        seed=SEED,
        shuffle=True,
        message_deadline_s=600.0,
        prices=load_spec("local"),
    )


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
