"""What `experiments.studies.training_script` trains, as an ordinary script says it, and the same in plain PyTorch.

One process takes nothing from funcpipe but the order of the samples, and the factory that reads the data.
"""

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, default_collate

from funcpipe import data
from funcpipe.testing.shard_files import CLASSES, WIDTH, as_pair
from funcpipe.training.data import Batches
from funcpipe.training.shards import sharded_samples

SAMPLES, HELD_OUT, EPOCHS, STEPS_PER_EPOCH = 160, 36, 4, 10
STEPS = EPOCHS * STEPS_PER_EPOCH
MICRO_BATCH, GLOBAL_BATCH = 4, 16
STEP_S = 0.3
CLIP_NORM, DECAY = 0.5, 0.9


def model() -> nn.Module:
    torch.manual_seed(1)
    hidden = nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()
    return nn.Sequential(*hidden, nn.Linear(16, CLASSES)).double()


def optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW, without weight decay for biases and norms."""
    named = list(named_parameters)
    decayed = [p for name, p in named if name.endswith("weight") and p.dim() > 1]
    others = [p for name, p in named if not (name.endswith("weight") and p.dim() > 1)]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.02)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, label_smoothing=0.1)


def slow_loss(output: Tensor, target: Tensor) -> Tensor:
    """The loss, so late that a run lasts for several lives of a function."""
    if output.requires_grad:
        time.sleep(STEP_S / 2)
    return loss(output, target)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).double().mean()


def collated(samples: list[Any]) -> Any:
    """The inputs, shifted and scaled, and the targets."""
    inputs, targets = default_collate(samples)
    return inputs * 0.8 + 0.1, targets


def loader(url: str, *, shuffle: bool) -> DataLoader[Any]:
    """What a person's script loads with."""
    dataset: Any = data.mds(url, transform=as_pair)()
    return DataLoader(dataset, batch_size=GLOBAL_BATCH, shuffle=shuffle, collate_fn=collated)


@dataclass(kw_only=True)
class Found:
    """What a script ends with: tensors by what they are and what they are called, and what happened to functions."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors of one kind."""
        self.tensors |= {f"{kind}: {name}": tensor for name, tensor in tensors.items()}

    def of(self, kind: str) -> dict[str, Tensor]:
        """The tensors of one kind."""
        return {name: tensor for name, tensor in self.tensors.items() if name.startswith(f"{kind}: ")}

    def kinds(self) -> list[str]:
        """The kinds in the order in which they were added."""
        return list(dict.fromkeys(name.partition(": ")[0] for name in self.tensors))


def one_process(training_url: str, held_out_url: str) -> Found:
    """The same in plain PyTorch."""
    module, samples = model(), loader(training_url, shuffle=True).dataset
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))  # type: ignore[no-untyped-call]
    chosen = optimizer(module.named_parameters())
    schedule = CosineAnnealingLR(chosen, T_max=STEPS, eta_min=1e-3)
    found, losses, validations, best = Found(), list[float](), dict[str, Tensor](), (math.inf, dict[str, Tensor]())
    for epoch in range(EPOCHS):
        for indices in _order(samples, epoch):
            inputs, targets = collated([samples[i] for i in indices])
            chosen.zero_grad()
            value = loss(module(inputs), targets)
            torch.autograd.backward(value)
            nn.utils.clip_grad_norm_(module.parameters(), CLIP_NORM)
            chosen.step()
            schedule.step()
            average.update_parameters(module)
            losses.append(value.item())
        measured = _measured(module, held_out_url)[0]
        validations[str((epoch + 1) * STEPS_PER_EPOCH)] = measured
        if measured[0].item() < best[0]:
            best = measured[0].item(), {name: tensor.clone() for name, tensor in module.state_dict().items()}
    found.add("losses", {"of all steps": torch.tensor(losses, dtype=torch.float64)})
    found.add("parameters", module.state_dict())
    found.add("average", average.module.state_dict())
    found.add("best model", best[1])
    found.add("validations", validations)
    measured, outputs = _measured(module, held_out_url)
    found.add("evaluation", {"loss, accuracy": measured})
    found.add("predictions", {"output": outputs})
    found.add("exported model", module.state_dict())
    found.add("curves in the CSV", {"loss": torch.tensor(losses, dtype=torch.float64)})
    found.add("curves in TensorBoard", {"loss": torch.tensor(losses, dtype=torch.float32)})
    return found


def _order(samples: Any, epoch: int) -> Iterator[list[int]]:
    """The samples of each step."""
    shards = sharded_samples(samples, SAMPLES, dataset_samples=SAMPLES, micro_batch=MICRO_BATCH, replicas=2)
    batches = Batches(
        samples=SAMPLES, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, seed=0, shuffle=True, shards=shards
    )
    return ([i for indices in step.micro_batches for i in indices] for step in batches.epoch(epoch))


def _measured(module: nn.Module, url: str) -> tuple[Tensor, Tensor]:
    """The loss and accuracy of all held out samples, and the outputs for them."""
    samples = loader(url, shuffle=False).dataset
    inputs, targets = collated([samples[i] for i in range(HELD_OUT)])
    with torch.no_grad():
        outputs = module.eval()(inputs)
        values = torch.stack([loss(outputs, targets), accuracy(outputs, targets)])
    module.train()
    return values, outputs
