"""Metrics that a validation measures in parts: functions, those of torchmetrics, and those of Hugging Face's evaluate.

A part holds what one of them keeps of some micro-batches, as tensors by name:

    value/NAME              the sum of a function's value over samples
    updates/NAME            how often a torchmetric was updated
    state/NAME/STATE        a state of a torchmetric, combined by the reduction that it declares
    state/NAME/STATE#3      an item of a state that is a list; evaluate's metrics have predictions and references
"""

import copy
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from funcpipe.core.texts import error_text
from funcpipe.errors import DataError, InvalidValue
from funcpipe.model.tensors import flatten

Part = dict[str, Tensor]

MetricFunction = Callable[[Any, Any], Any]
"""The mean of a measure over the samples it is given, of the model's output and the target."""

_IGNORED = -100
"""A label that counts for nothing, as in torch's cross_entropy."""


class Measure(Protocol):
    """A metric, part by part."""

    def begin(self) -> None:
        """Begin a new part."""

    def add(self, output: Any, target: Any, samples: int) -> None:
        """Add a micro-batch of so many samples."""

    def part(self) -> Part:
        """Return the sums since the part began."""

    def value(self, parts: Sequence[Part], samples: int) -> float:
        """Return the metric over all parts, which have so many samples. Raises DataError unless it is one number."""


def is_torchmetric(metric: Any) -> bool:
    """Return True if `metric` is a torchmetrics.Metric, by its states: the library need not be loaded."""
    return all(hasattr(metric, name) for name in ("update", "compute", "reset", "_defaults", "_reductions"))


def _is_evaluate_metric(metric: Any) -> bool:
    """Return True if `metric` is one that Hugging Face's evaluate loads, or behaves like one."""
    return all(hasattr(metric, name) for name in ("compute", "add_batch")) and not is_torchmetric(metric)


def made_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return each metric as an object of its own, or as a function; factories are called.

    Raises InvalidValue for what is neither, and for a torchmetric that keeps its state in others.
    """
    made: dict[str, Any] = {}
    for name, given in metrics.items():
        if not isinstance(name, str) or not name or not set(name).isdisjoint("/#"):
            raise InvalidValue("metrics", name, "must be names without slashes and number signs")
        metric = _own(name, given if _is_object(given) and not isinstance(given, type) else _called(name, given))
        if is_torchmetric(metric):
            if not metric._defaults or any(is_torchmetric(other) for other in list(metric.modules())[1:]):
                rule = "must keep its state in itself, not in other metrics: give these one by one"
                raise InvalidValue(f"metrics[{name!r}]", metric, rule)
            metric.reset()
        made[name] = metric
    return made


def measure_of(name: str, metric: Any) -> Measure:
    """Return the metric of that name, one of `made_metrics`, part by part."""
    if is_torchmetric(metric):
        return _Torchmetric(name, metric)
    return _Evaluates(name, metric) if _is_evaluate_metric(metric) else _Mean(name, metric)


def one_number(what: str, value: Any) -> float:
    """Return `value` as a number. Raises DataError for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.detach())
    if isinstance(value, numbers.Real):
        return float(value)
    shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise DataError(f"{what} must give one number, the mean over the samples, but gives {shape}")


def total(parts: Sequence[Part], name: str) -> float:
    """Return the sum of a number of all parts, in their order."""
    found = 0.0
    for part in parts:
        found += float(part[name])
    return found


def _is_object(metric: Any) -> bool:
    return is_torchmetric(metric) or _is_evaluate_metric(metric)


def _own(name: str, metric: Any) -> Any:
    """Return a copy of a metric that holds a state; a function as it is."""
    try:
        return copy.deepcopy(metric) if _is_object(metric) else metric
    except Exception as error:
        rule = f"cannot be copied ({error_text(error)}), as after it was used; give a factory that makes it"
        raise InvalidValue(f"metrics[{name!r}]", metric, rule) from error


def _called(name: str, given: Any) -> Any:
    """Return the result of a factory, which takes no arguments; any other function as it is."""
    if not callable(given):
        rule = "must be a metric of torchmetrics or evaluate, a factory of one, or a function of output and target"
        raise InvalidValue(f"metrics[{name!r}]", given, rule)
    try:
        inspect.signature(given).bind()
    except (TypeError, ValueError):
        return given
    made = given()
    if not _is_object(made):
        rule = "must make a metric of torchmetrics or evaluate where it takes no arguments"
        raise InvalidValue(f"metrics[{name!r}]", made, rule)
    return made


def _compared(output: Any) -> Any:
    """Return the tensor that libraries compare with targets: the output itself, its `logits`, or the only one in it
    besides a loss; the output as it is where that is none of them.
    """
    if isinstance(output, Tensor):
        return output
    logits, loss = (
        output.get(name) if isinstance(output, Mapping) else getattr(output, name, None) for name in ("logits", "loss")
    )
    if isinstance(logits, Tensor):
        return logits
    found = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor) and leaf is not loss]
    return found[0] if len(found) == 1 else output


class _Mean:
    def __init__(self, name: str, function: MetricFunction) -> None:
        self._name, self._function = name, function
        self._sum = 0.0

    def begin(self) -> None:
        self._sum = 0.0

    def add(self, output: Any, target: Any, samples: int) -> None:
        self._sum += one_number(f"the metric {self._name}", self._function(output, target)) * samples

    def part(self) -> Part:
        return {f"value/{self._name}": torch.tensor(self._sum, dtype=torch.float64)}

    def value(self, parts: Sequence[Part], samples: int) -> float:
        return total(parts, f"value/{self._name}") / max(samples, 1)


class _Torchmetric:
    """A metric with states, which are combined by the reductions that it declares.

    The library's own take tensors; one that a user has written is given the output as it is.
    """

    def __init__(self, name: str, metric: Any) -> None:
        self._name, self._metric = name, metric
        self._takes_tensors = type(metric).update.__module__.partition(".")[0] == "torchmetrics"

    def begin(self) -> None:
        self._metric.reset()

    def add(self, output: Any, target: Any, samples: int) -> None:
        self._metric.update(_compared(output) if self._takes_tensors else output, target)

    def part(self) -> Part:
        part = {f"updates/{self._name}": torch.tensor(self._metric._update_count)}
        for state in self._metric._defaults:
            part |= _named(f"state/{self._name}/{state}", getattr(self._metric, state))
        return part

    def value(self, parts: Sequence[Part], samples: int) -> float:
        return one_number(f"the metric {self._name}", self._computed(parts))

    def _computed(self, parts: Sequence[Part]) -> Any:
        """Return the value with the states of all parts, each combined by its reduction."""
        used = [part for part in parts if int(part[f"updates/{self._name}"])]
        updates = [int(part[f"updates/{self._name}"]) for part in used]
        combined = copy.deepcopy(self._metric)
        combined.reset()
        for state, default in self._metric._defaults.items():
            if used:
                prefix = f"state/{self._name}/{state}"
                if isinstance(default, list):
                    setattr(combined, state, _items(used, prefix))
                else:
                    reduction = self._metric._reductions[state]
                    setattr(combined, state, _reduced(reduction, [part[prefix] for part in used], updates))
        combined._update_count = sum(updates)
        combined._computed = None
        return combined.compute()


class _Evaluates:
    """A metric that compares all predictions with all references at once, as those of Hugging Face's evaluate do."""

    def __init__(self, name: str, metric: Any) -> None:
        self._name, self._metric = name, metric
        self.begin()

    def begin(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def add(self, output: Any, target: Any, samples: int) -> None:
        found = _compared(output)
        if not isinstance(found, Tensor) or not isinstance(target, Tensor):
            raise DataError(
                f"the metric {self._name} compares a tensor with a tensor, and the output is a {type(found).__name__} "
                f"and the target a {type(target).__name__}; give a function of both that returns the mean"
            )
        self._pairs.append(_predicted(self._name, found.detach(), target.detach()))

    def part(self) -> Part:
        predictions, references = ([pair[i] for pair in self._pairs] for i in range(2))
        prefix = f"state/{self._name}"
        return _named(f"{prefix}/predictions", predictions) | _named(f"{prefix}/references", references)

    def value(self, parts: Sequence[Part], samples: int) -> float:
        kinds = ("predictions", "references")
        compared = {kind: _array(_items(parts, f"state/{self._name}/{kind}")) for kind in kinds}
        result = copy.deepcopy(self._metric).compute(**compared)  # one that was used cannot be sent any more
        if isinstance(result, Mapping):
            if self._name not in result and len(result) != 1:
                names = ", ".join(map(repr, result))
                raise DataError(f"the metric {self._name} gives {names}: call it by the name of one of them")
            result = result[self._name] if self._name in result else next(iter(result.values()))
        return one_number(f"the metric {self._name}", result)


def _predicted(name: str, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Predictions and references: the class of the largest logit where targets are classes, without ignored ones."""
    of_classes = not target.is_floating_point()
    if of_classes and output.is_floating_point() and output.dim() == target.dim() + 1:
        dim = -1 if output.shape[:-1] == target.shape else 1
        if output.size(dim) == 1:
            raise DataError(
                f"the metric {name} compares classes, and the output has one number for each sample: above which it is "
                "class 1 is not known; give a function of output and target that returns the mean"
            )
        output = output.argmax(dim)
    elif output.shape == (*target.shape, 1):
        output = output.squeeze(-1)
    if of_classes and target.dim() > 1 and output.shape == target.shape:
        counts = target != _IGNORED
        return output[counts], target[counts]
    return output, target


def _array(items: Sequence[Tensor]) -> Any:
    joined = torch.cat(list(items)) if items else torch.zeros(0)
    return (joined.float() if joined.dtype is torch.bfloat16 else joined).numpy()


def _named(prefix: str, state: Any) -> Part:
    """Return a state of a metric as tensors by name."""
    if isinstance(state, Tensor):
        return {prefix: state.detach()}
    return {f"{prefix}#{i}": torch.as_tensor(item).detach() for i, item in enumerate(state)}


def _items(parts: Sequence[Part], prefix: str) -> list[Tensor]:
    found = []
    for part in parts:
        count = sum(name.startswith(f"{prefix}#") for name in part)
        found += [part[f"{prefix}#{i}"] for i in range(count)]
    return found


def _reduced(reduction: Any, values: Sequence[Tensor], updates: Sequence[int]) -> Tensor:
    if len(values) == 1:
        return values[0]
    stacked = torch.stack(list(values))
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
