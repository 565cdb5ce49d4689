"""Random models, and the one question about them: are they trained as plain PyTorch trains them, or refused?

A model is drawn from a seed: two to five parts, some of them tied, skipped over or of the same class; its output is a
tensor, a tuple, a dictionary or a dataclass. It is trained for two steps of two micro-batches, the last one shorter and
some of another length, by up to three stages on one or two replicas: functions that are threads of this process.
"""

import random
import traceback
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.client.follow.launch import launch
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import OptimizerKind, Plan, ScheduleKind, Sync, Wire
from funcpipe.errors import DataError, FuncPipeError, InputError
from funcpipe.model.graph import LayerGraph, trace
from funcpipe.model.tensors import flatten
from funcpipe.platforms.catalog import load_spec
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform, one_at_a_time
from funcpipe.training import recipe as training
from funcpipe.training.data import load_batch
from funcpipe.training.plain import train_in_one_process
from tests.model.graph.composed import plain, tricky
from tests.model.graph.composed.base import WIDTH, WORDS, Inputs, Part
from tests.support.plans import even_stages

PARTS: tuple[type[nn.Module], ...] = (Part, *plain.PARTS, *tricky.PARTS)
SAMPLES, MICRO_BATCH, GLOBAL_BATCH, SEED = 7, 2, 4, 3
TOLERANCE = 1e-4
optimizer = partial(torch.optim.SGD, lr=0.05)


@dataclass
class Output:
    """The output of some models."""

    logits: Tensor
    hidden: tuple[Tensor, ...]


class Composed(nn.Module):
    """The parts one after the other; part i adds the activations after part `skips[i]`, if there are any."""

    def __init__(self, parts: list[nn.Module], skips: dict[int, int], output: str) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.parts = nn.ModuleList(parts)
        self.head = nn.Linear(WIDTH, WORDS)
        self.skips = skips
        self.output = output

    def forward(self, words: Tensor, mask: Tensor) -> Any:
        inputs, x, kept = Inputs(words, mask), self.table(words), []
        for i, part in enumerate(self.parts):
            x = part(x, inputs)
            kept.append(x)
            if i in self.skips:
                x = x + kept[self.skips[i]]
        logits = self.head(x)
        if self.output == "tuple":
            return logits, (x, None)
        if self.output == "dictionary":
            return {"logits": logits, "hidden": [x]}
        return Output(logits, (x,)) if self.output == "dataclass" else logits


class Data:
    """Samples of one length for each micro-batch, the first one's unless `lengths` vary; not shuffled."""

    def __init__(self, seed: int, lengths: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.samples = []
        for i in range(SAMPLES):
            length = lengths[i // MICRO_BATCH % len(lengths)]
            words = torch.randint(0, WORDS, (length,), generator=generator)
            mask = torch.rand(length, generator=generator) < 0.6
            self.samples.append((words, mask, torch.zeros(())))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


@dataclass(frozen=True)
class Recipe:
    """The parts of a model, its samples' lengths and its replicas, as a seed draws them."""

    parts: tuple[str, ...]
    skips: dict[int, int]
    tied: tuple[int, int] | None
    output: str
    lengths: tuple[int, ...]
    replicas: int


def recipe(seed: int) -> Recipe:
    """The recipe of `seed`."""
    draw = random.Random(seed)
    count = draw.randint(2, 5)
    names = [kind.__name__ for kind in PARTS]
    parts = tuple(draw.choice(names) for _ in range(count))
    skips = {i: draw.randrange(i) for i in range(1, count) if draw.random() < 0.25}
    tied = (draw.randrange(count), draw.randrange(count)) if draw.random() < 0.3 else None
    output = draw.choice(["tensor", "tensor", "tuple", "dictionary", "dataclass"])
    lengths = tuple(draw.choice([3, 5, 6]) for _ in range(1 if draw.random() < 0.7 else 4))
    return Recipe(parts, skips, tied, output, lengths, draw.choice([1, 1, 1, 2]))


def compose(made: Recipe, seed: int) -> Composed:
    """The model of a recipe; of two tied parts, linear layers share their weights."""
    torch.manual_seed(seed)
    kinds = {kind.__name__: kind for kind in PARTS}
    model = Composed([kinds[name]() for name in made.parts], made.skips, made.output)
    if made.tied is not None:
        one, other = (getattr(model.parts[i], "inner", None) for i in made.tied)
        if isinstance(one, nn.Linear) and isinstance(other, nn.Linear):
            other.weight = one.weight
    return model.train()


def loss_of(output: Any, target: Any = None) -> Tensor:
    """A loss that every floating part of the output has its share in."""
    leaves = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([leaf.square().mean() for leaf in leaves]).sum()


@dataclass(frozen=True)
class Verdict:
    """`kind` is 'equal', 'refused', 'wrong', 'crash' or, where plain PyTorch cannot train the model, 'unusable'."""

    kind: str
    why: str
    recipe: Recipe
    tracer: str = ""


def judge(made: Recipe, seed: int) -> Verdict:
    """Train the model that `made` and `seed` stand for both ways."""
    data = Data(seed, made.lengths)
    verdict = partial(Verdict, recipe=made)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _train_plainly(compose(made, seed), data)
        except Exception as error:  # noqa: BLE001 - whatever plain PyTorch says
            return verdict("unusable", f"{type(error).__name__}: {error}")
        tracer = ""
        try:
            model = compose(made, seed)
            batch = load_batch(data, range(MICRO_BATCH))
            graph = trace(model, batch.args, batch.kwargs)
            tracer = graph.tracer
            wrong = _difference(model, graph, data, made.replicas)
        except FuncPipeError as error:
            of_later_batch = f" {DataError.__name__}: " in str(error)  # a function has refused it
            refused = isinstance(error, InputError) or of_later_batch
            return verdict("refused" if refused else "crash", f"{type(error).__name__}: {error}", tracer=tracer)
        except Exception:  # noqa: BLE001 - a crash is what is looked for
            return verdict("crash", traceback.format_exc()[-1500:], tracer=tracer)
    return verdict("wrong" if wrong else "equal", wrong or "", tracer=tracer)


def _train_plainly(model: nn.Module, data: Data) -> None:
    chosen = optimizer(model.parameters())
    for first in range(0, SAMPLES, MICRO_BATCH):
        batch = load_batch(data, range(first, min(SAMPLES, first + MICRO_BATCH)))
        torch.autograd.backward(loss_of(model(*batch.args)))
    chosen.step()


def _difference(model: nn.Module, graph: LayerGraph, data: Data, replicas: int) -> str | None:
    """The first tensor that training leaves otherwise than plain PyTorch does, if there is one."""
    names = [layer.name for layer in graph.layers]
    plan = Plan(
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        replicas=replicas,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        optimizer=OptimizerKind.SGD,
        model=graph.name,
        platform="local",
        stages=even_stages(names, min(3, len(names))),
    )
    job = Job(
        graph=graph,
        plan=plan,
        recipe=training.Recipe(loss=loss_of, optimizer=optimizer),
        dataset=lambda: data,
        samples=SAMPLES,
        epochs=1,
        seed=SEED,
        shuffle=False,
        message_deadline_s=300.0,
        prices=load_spec("local"),
    )
    steps = list(job.batches.epoch(0))
    expected = train_in_one_process(
        model, graph, data, steps, recipe=training.Recipe(loss=loss_of, optimizer=optimizer), seed=SEED
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    site = Site(ThreadPlatform(load_spec("local"), storage := MemoryStorage()), storage, "memory://")
    with one_at_a_time():
        found = launch(prepare(job, session_on(site))).state_dict()
    for name, tensor in model.state_dict().items():
        if not torch.equal(tensor, before[name]):
            return f"{name} of the user's model changed"
    for name, tensor in expected.state_dict().items():
        got = found.get(name, before[name])
        if (off := _off(got, tensor)) > TOLERANCE:
            return f"{name} is off by {off:.1e}"
    return None


def _off(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest element or to 1e-3."""
    if expected.numel() == 0 or torch.equal(found, expected):
        return 0.0
    wide = torch.complex128 if expected.is_complex() else torch.float64
    difference = float((found.to(wide) - expected.to(wide)).abs().max())
    scale = max(float(expected.to(wide).abs().max()), 1e-3)
    return difference / scale if difference == difference else float("inf")
