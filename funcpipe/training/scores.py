"""What the last stage measures of a model in eval mode: the loss and metrics, in parts that add up exactly.

A part holds the sums over some micro-batches, as tensors by name, and parts combine to what one pass over all of the
data would have measured:

    samples                 how many
    loss                    the sum of the loss over samples, in double precision
    weight                  what the sum is to be divided by: the samples, or the weights that the loss returns
    value/NAME              the sum of a function's value over samples
    updates/NAME            how often a torchmetric was updated
    state/NAME/STATE        a state of a torchmetric, combined by the reduction that it declares
    state/NAME/STATE#3      an item of a state that is a list
"""

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from funcpipe.errors import DataError, InvalidValue
from funcpipe.training.recipe import LossFunction

Part = dict[str, Tensor]

MetricFunction = Callable[[Any, Any], Any]
"""The mean of a measure over the samples it is given, of the model's output and the target."""


def is_torchmetric(metric: Any) -> bool:
    """Whether `metric` is a torchmetrics.Metric, as far as its states tell: the library need not be loaded."""
    return all(hasattr(metric, name) for name in ("update", "compute", "reset", "_defaults", "_reductions"))


def made_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Each metric as a torchmetric of its own, or as a function; factories are called.

    Raises InvalidValue for what is neither, and for a torchmetric that keeps its state in others.
    """
    made: dict[str, Any] = {}
    for name, given in metrics.items():
        if not isinstance(name, str) or not name or not set(name).isdisjoint("/#"):
            raise InvalidValue("metrics", name, "must be names without slashes and number signs")
        metric = given if is_torchmetric(given) and not isinstance(given, type) else _called(name, given)
        if is_torchmetric(metric):
            metric = copy.deepcopy(metric)
            if not metric._defaults or any(is_torchmetric(other) for other in list(metric.modules())[1:]):
                rule = "must keep its state in itself, not in other metrics: give these one by one"
                raise InvalidValue(f"metrics[{name!r}]", metric, rule)
            metric.reset()
        made[name] = metric
    return made


def _called(name: str, given: Any) -> Any:
    """What a factory, which takes no arguments, makes; any other function as it is."""
    if not callable(given):
        rule = "must be a torchmetric, a factory of one, or a function of the output and the target"
        raise InvalidValue(f"metrics[{name!r}]", given, rule)
    try:
        inspect.signature(given).bind()
    except (TypeError, ValueError):
        return given
    made = given()
    if not is_torchmetric(made):
        raise InvalidValue(f"metrics[{name!r}]", made, "must make a torchmetric where it takes no arguments")
    return made


class Scores:
    """Adds up the loss and the metrics of micro-batches, part by part."""

    def __init__(self, loss: LossFunction | None, metrics: Mapping[str, Any]) -> None:
        """`loss` is None where nothing is compared with a target."""
        self._loss = loss
        self._metrics = made_metrics(metrics)
        self.begin()

    def begin(self) -> None:
        """Begin a new part."""
        self._samples = 0
        values = [f"value/{name}" for name, metric in self._metrics.items() if _is_function(metric)]
        self._sums = dict.fromkeys(("loss", "weight", *values), 0.0)
        for metric in self._metrics.values():
            if is_torchmetric(metric):
                metric.reset()

    def add(self, output: Any, target: Any, samples: int) -> None:
        """Add a micro-batch of so many samples. Raises DataError for a loss or metric that is not one number."""
        self._samples += samples
        if self._loss is not None:
            found = self._loss(output, target)
            if isinstance(found, tuple):
                total, weight = found[0].item(), found[1]
            else:
                total, weight = _number("the loss function", found) * samples, float(samples)
            self._sums["loss"] += total
            self._sums["weight"] += weight
        for name, metric in self._metrics.items():
            if is_torchmetric(metric):
                metric.update(output, target)
            else:
                self._sums[f"value/{name}"] += _number(f"the metric {name}", metric(output, target)) * samples

    def part(self) -> Part:
        """What was added since the part began."""
        part = {"samples": torch.tensor(self._samples)}
        part |= {name: torch.tensor(total, dtype=torch.float64) for name, total in self._sums.items()}
        for name, metric in self._metrics.items():
            if is_torchmetric(metric):
                part[f"updates/{name}"] = torch.tensor(metric._update_count)
                for state in metric._defaults:
                    part |= _named(f"state/{name}/{state}", getattr(metric, state))
        return part

    def values(self, parts: Sequence[Part], *, loss: str) -> tuple[int, dict[str, float]]:
        """The number of samples in all `parts`, the mean loss under the name `loss`, and each metric by its own."""
        samples = sum(int(part["samples"]) for part in parts)
        found = {}
        if self._loss is not None:
            weight = _total(parts, "weight")
            found[loss] = _total(parts, "loss") / weight if weight else math.nan
        for name, metric in self._metrics.items():
            if is_torchmetric(metric):
                found[name] = _number(f"the metric {name}", _computed(metric, name, parts))
            else:
                found[name] = _total(parts, f"value/{name}") / max(samples, 1)
        return samples, found


def _is_function(metric: Any) -> bool:
    return not is_torchmetric(metric)


def _number(what: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.detach())
    if isinstance(value, int | float):
        return float(value)
    shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise DataError(f"{what} must give one number, the mean over the samples, but gives {shape}")


def _named(prefix: str, state: Any) -> Part:
    """A state of a torchmetric as tensors by name."""
    if isinstance(state, Tensor):
        return {prefix: state.detach()}
    return {f"{prefix}#{i}": torch.as_tensor(item).detach() for i, item in enumerate(state)}


def _total(parts: Sequence[Part], name: str) -> float:
    total = 0.0
    for part in parts:
        total += float(part[name])
    return total


def _computed(metric: Any, name: str, parts: Sequence[Part]) -> Any:
    """The value of a torchmetric with the states of all parts, each combined by its reduction."""
    used = [part for part in parts if int(part[f"updates/{name}"])]
    updates = [int(part[f"updates/{name}"]) for part in used]
    combined = copy.deepcopy(metric)
    combined.reset()
    for state, default in metric._defaults.items():
        if used:
            prefix = f"state/{name}/{state}"
            is_list = isinstance(default, list)
            setattr(
                combined, state, _items(used, prefix) if is_list else _reduced(metric, state, used, prefix, updates)
            )
    combined._update_count = sum(updates)
    combined._computed = None
    return combined.compute()


def _items(parts: Sequence[Part], prefix: str) -> list[Tensor]:
    found = []
    for part in parts:
        count = sum(name.startswith(f"{prefix}#") for name in part)
        found += [part[f"{prefix}#{i}"] for i in range(count)]
    return found


def _reduced(metric: Any, state: str, parts: Sequence[Part], prefix: str, updates: Sequence[int]) -> Tensor:
    reduction = metric._reductions[state]
    values = [part[prefix] for part in parts]
    if len(values) == 1:
        return values[0]
    stacked = torch.stack(values)
    if reduction is None:
        return stacked
    kind = getattr(reduction, "__name__", "")
    if kind == "dim_zero_mean":  # a mean over updates, of which the last part may have fewer
        weights = torch.tensor(updates, dtype=stacked.dtype).reshape(-1, *[1] * values[0].dim())
        return (stacked * weights).sum(0) / sum(updates)
    if kind == "dim_zero_cat":
        return torch.cat([value.reshape(1) if not value.dim() else value for value in values])
    reduced: Tensor = reduction(stacked)
    return reduced
