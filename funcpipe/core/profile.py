"""Measurements: of a model, which planning starts from, of a platform in its functions, and of a storage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from funcpipe.core import checks
from funcpipe.core.accelerator import Accelerator, Work, total
from funcpipe.core.choices import Precision
from funcpipe.core.json_form import IF_CHANGED
from funcpipe.core.platform import FunctionSize
from funcpipe.core.texts import Described
from funcpipe.errors import InvalidValue


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One layer, for one micro-batch; seconds run along the profile's `sizes`.

    `parameter_bytes` are trainable; frozen parameters and buffers, and packages that only this layer needs, are
    `constant_bytes`. `activation_bytes` is what the layer keeps from its forward until its backward. `input_bytes`
    are the model inputs that it reads. `parts` names the layers of the model's graph that were folded into this one, in
    order; it is empty for a single layer. `workspace_bytes` is what the layer needs in addition while it runs, forward
    or backward. On a GPU, whose operators are others, a layer may keep another number of bytes:
    `device_activation_bytes`, if that is known. `forward_spread` and `backward_spread` are the interquartile range of
    the measured seconds divided by their median. `forward_work` and `backward_work` tell how long it takes on a device
    that was not measured; profiles of old lack them.
    """

    name: str
    parameter_bytes: int
    activation_bytes: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    constant_bytes: int = 0
    input_bytes: int = 0
    parts: tuple[str, ...] = ()
    workspace_bytes: int = 0
    forward_spread: float = 0.0
    backward_spread: float = 0.0
    forward_work: Work | None = None
    backward_work: Work | None = None
    device_activation_bytes: int | None = field(default=None, metadata=IF_CHANGED)

    def __post_init__(self) -> None:
        checks.all_at_least(self, 0, "parameter_bytes", "activation_bytes", "constant_bytes", "input_bytes")
        checks.all_at_least(self, 0, "device_activation_bytes")
        checks.all_at_least(self, 0, "workspace_bytes", "forward_spread", "backward_spread")
        for name in ("forward_s", "backward_s"):
            for i, seconds in enumerate(getattr(self, name)):
                checks.at_least(f"{name}[{i}]", seconds, 0)

    def seconds_on(self, device: Accelerator, precision: Precision) -> tuple[float, float]:
        """Return the seconds of a forward and of a backward by the published rates of `device`.

        Raises InvalidValue where the work of the layer, or a rate, is not known.
        """
        if self.forward_work is None or self.backward_work is None:
            raise InvalidValue(
                f"work of {self.name}", None, f"must be known for {device.name}; profile the model again"
            )
        forward_s, backward_s = (device.seconds(work, precision) for work in (self.forward_work, self.backward_work))
        if forward_s is None or backward_s is None:
            raise InvalidValue(f"rates of {device.name}", None, "must be known: fp32_tflop_s and memory_gb_s")
        return forward_s, backward_s

    @property
    def kept_on_device_bytes(self) -> int:
        """The bytes that the layer keeps on a GPU from its forward until its backward."""
        return self.activation_bytes if self.device_activation_bytes is None else self.device_activation_bytes

    @property
    def graph_layers(self) -> tuple[str, ...]:
        """The names of the graph's layers that this one stands for."""
        return self.parts or (self.name,)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorProfile:
    """A tensor made by the layer `producer` and read by the later layers `consumers`, for one micro-batch.

    `backward_bytes` is 0 where no gradient travels back. `saved_by` are the layers that keep the tensor's memory from
    their forward until their backward, in order; it counts in the `activation_bytes` of the first of them.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]
    forward_bytes: int
    backward_bytes: int
    saved_by: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        checks.at_least("producer", self.producer, 0)
        checks.filled("consumers", self.consumers)
        for i, consumer in enumerate(self.consumers):
            if consumer <= self.producer:
                rule = f"must come after the producer {self.producer} (no cycles)"
                raise InvalidValue(f"consumers[{i}]", consumer, rule)
            if i > 0 and consumer <= self.consumers[i - 1]:
                raise InvalidValue("consumers", self.consumers, "must be in ascending order, each once")
        if list(self.saved_by) != sorted({layer for layer in self.saved_by if layer >= 0}):
            raise InvalidValue("saved_by", self.saved_by, "must be layers in ascending order, each once")
        checks.all_at_least(self, 0, "forward_bytes", "backward_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedParameter:
    """A trainable parameter that several `layers` use, in ascending order; it counts in the `parameter_bytes` of each.

    Different stages that hold it sum its gradient.
    """

    name: str
    layers: tuple[int, ...]
    parameter_bytes: int

    def __post_init__(self) -> None:
        checks.at_least("parameter_bytes", self.parameter_bytes, 0)
        if len(self.layers) < 2 or list(self.layers) != sorted(set(self.layers)):
            raise InvalidValue("layers", self.layers, "must be two layers or more, in ascending order, each once")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledBucket:
    """Inputs of these `shapes`, by name, were measured for the `share` of all batches that are like them."""

    shapes: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DataProfile:
    """The cost of loading in the functions that read data: those of stages with inputs of the model, and of the last.

    `load_s` are seconds for one micro-batch, whatever the function's size; `batch_bytes` and `target_bytes` are those
    of a loaded micro-batch, and of its target alone; `resident_bytes` is the memory of the dataset itself.
    """

    load_s: float
    batch_bytes: int
    target_bytes: int
    resident_bytes: int

    def __post_init__(self) -> None:
        checks.all_at_least(self, 0, "load_s", "batch_bytes", "target_bytes", "resident_bytes")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ModelProfile(Described):
    """A model as a graph of layers in topological order, measured for one micro-batch size on some function sizes.

    `base_memory_bytes` is what a function needs before it holds any of the model. `estimated` is true where seconds
    were scaled from measurements on another machine by the platform's vCPU curve, or are those of GPUs by their
    published rates. Where inputs of several lengths were measured, `buckets` says which: seconds and bytes sent are
    their mean, what a function must hold is the largest. `carried` names what a forward leaves for the next one: if
    there is anything, micro-batches must follow each other, and plans have one replica. `blocks` are the paths of
    modules that were traced as one layer each, `precision` is what layers computed in. `data` is None where loading was
    not measured: then it is taken to need neither time nor memory. `output_bytes` are those of what the model returns;
    profiles of old may lack it. `timed_as` maps layers of the graph to an equal one, with the same code and shapes,
    that was timed in their place.
    """

    FORMAT: ClassVar[str] = "funcpipe.profile/1"

    model: str
    micro_batch: int
    platform: str
    sizes: tuple[str, ...]
    base_memory_bytes: int
    layers: tuple[LayerProfile, ...]
    tensors: tuple[TensorProfile, ...]
    ties: tuple[TiedParameter, ...] = ()
    estimated: bool = False
    carried: tuple[str, ...] = ()
    buckets: tuple[ProfiledBucket, ...] = ()
    blocks: tuple[str, ...] = ()
    precision: Precision = Precision.FP32
    data: DataProfile | None = None
    output_bytes: int | None = None
    timed_as: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        checks.at_least("micro_batch", self.micro_batch, 1)
        checks.all_at_least(self, 0, "base_memory_bytes", "output_bytes")
        checks.filled("sizes", self.sizes)
        checks.distinct("sizes", self.sizes)
        checks.filled("layers", self.layers)
        checks.distinct("layers", [layer.name for layer in self.layers])
        checks.distinct("layers", [name for layer in self.layers for name in layer.graph_layers])
        for i, layer in enumerate(self.layers):
            for name in ("forward_s", "backward_s"):
                if len(getattr(layer, name)) != len(self.sizes):
                    rule = f"must hold one value for each of the {len(self.sizes)} sizes"
                    raise InvalidValue(f"layers[{i}].{name}", getattr(layer, name), rule)
        for i, tensor in enumerate(self.tensors):
            for name in ("consumers", "saved_by"):
                if max(getattr(tensor, name), default=0) >= len(self.layers):
                    rule = f"must name one of the {len(self.layers)} layers"
                    raise InvalidValue(f"tensors[{i}].{name}", getattr(tensor, name)[-1], rule)
        for i, tie in enumerate(self.ties):
            if not 0 <= tie.layers[0] <= tie.layers[-1] < len(self.layers):
                rule = f"must name some of the {len(self.layers)} layers"
                raise InvalidValue(f"ties[{i}].layers", tie.layers, rule)

    def on_sizes(
        self, platform: str, sizes: Sequence[FunctionSize], *, precision: Precision | None = None
    ) -> "ModelProfile":
        """Return the same profile for `sizes` of `platform`: those that have an accelerator are estimated by its rates.

        They compute in `precision`, by default that of the profile. Raises InvalidValue for another size that was not
        measured, and where the work of a layer is not known.
        """
        found = [
            [
                layer.seconds_on(size.accelerator, precision or self.precision)
                if size.accelerator is not None
                else (layer.forward_s[self._column(size.name)], layer.backward_s[self._column(size.name)])
                for size in sizes
            ]
            for layer in self.layers
        ]
        layers = tuple(
            replace(layer, forward_s=tuple(f for f, _ in row), backward_s=tuple(b for _, b in row))
            for layer, row in zip(self.layers, found, strict=True)
        )
        guessed = any(size.accelerator is not None for size in sizes)
        return replace(
            self,
            platform=platform,
            sizes=tuple(size.name for size in sizes),
            layers=layers,
            estimated=self.estimated or guessed,
        )

    def _column(self, size: str) -> int:
        if size not in self.sizes:
            raise InvalidValue("size", size, f"must be one that was measured: {', '.join(self.sizes)}")
        return self.sizes.index(size)

    @property
    def joint_bytes(self) -> int:
        """The bytes of a micro-batch that a loss of the whole batch needs: its output, and its target if loading was
        measured. Raises InvalidValue if the output was not.
        """
        if self.output_bytes is None:
            raise InvalidValue(
                "output_bytes", None, "must be known for a joint loss (coupled='cache'); profile the model again"
            )
        return self.output_bytes + (0 if self.data is None else self.data.target_bytes)

    @property
    def work(self) -> Work | None:
        """The work of a forward and a backward of all layers; None in profiles of old."""
        return total(part for layer in self.layers for part in (layer.forward_work, layer.backward_work))

    def parameter_bytes(self, first: int, stop: int) -> int:
        """Return bytes of the distinct trainable parameters of the layers [first, stop)."""
        repeated = sum(
            tie.parameter_bytes * max(0, sum(first <= layer < stop for layer in tie.layers) - 1) for tie in self.ties
        )
        return sum(layer.parameter_bytes for layer in self.layers[first:stop]) - repeated

    def loads_data(self, first: int, stop: int) -> bool:
        """Return True if a stage [first, stop) loads data: it reads inputs of the model, or computes the loss."""
        return stop == len(self.layers) or any(layer.input_bytes > 0 for layer in self.layers[first:stop])

    def loaded_bytes(self, first: int, stop: int) -> int:
        """Return the bytes of a micro-batch that a stage [first, stop) keeps: its inputs, and targets for the loss."""
        if self.data is None:
            return 0
        target_bytes = self.data.target_bytes if stop == len(self.layers) else 0
        return sum(layer.input_bytes for layer in self.layers[first:stop]) + target_bytes

    def summed_bytes(self, first: int, stop: int) -> int:
        """Return bytes of the parameters whose gradient a stage [first, stop) sums over its replicas.

        A tied parameter counts in the first stage that holds it.
        """
        borrowed = sum(
            tie.parameter_bytes
            for tie in self.ties
            if tie.layers[0] < first and any(first <= layer < stop for layer in tie.layers)
        )
        return self.parameter_bytes(first, stop) - borrowed


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSpec:
    """The payload of a function that measures the `layers` with these numbers, or the platform if there are none.

    The function starts no measurement after `time_s`. `code` gives the SHA-256 of the bundle of each layer.
    """

    FORMAT: ClassVar[str] = "funcpipe.probe/1"

    run: str
    number: int
    size: str
    memory_mb: int
    storage: str
    platform: str
    time_s: float
    repeats: int = 1
    layers: tuple[int, ...] = ()
    code: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        checks.filled("run", self.run)
        checks.at_least("number", self.number, 0)
        checks.all_at_least(self, 1, "memory_mb", "repeats")
        checks.positive("time_s", self.time_s)

    @property
    def worker(self) -> str:
        """The function's short name."""
        return f"probe{self.number}"

    @property
    def attempt(self) -> int:
        """The only one."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """The measurements of a function of one size: its link to the storage, its memory, its processors.

    `one_thread_s` and `all_threads_s` are the seconds per matrix product with one thread, and with as many threads as
    the function sees processors.
    """

    FORMAT: ClassVar[str] = "funcpipe.machine/1"

    started_at_s: float
    latency_s: float
    upload_bytes_s: float
    download_bytes_s: float
    base_memory_bytes: int
    one_thread_s: float
    all_threads_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """Seconds of each timed forward and backward of a layer, what they compute, and bytes needed only meanwhile."""

    FORMAT: ClassVar[str] = "funcpipe.layer/1"

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    workspace_bytes: int
    forward_work: Work
    backward_work: Work


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """Seconds of the requests of one kind with a body of one byte: their median and 95th percentile."""

    median_s: float
    p95_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageReport:
    """The measurements of one process at the storage URL `storage`: `requests` of each kind, and bandwidths.

    Bandwidths are those of one stream, and of `streams` at once together, from bodies of up to `body_bytes` each.
    """

    FORMAT: ClassVar[str] = "funcpipe.storage/1"

    storage: str
    requests: int
    put: RequestTimes
    get: RequestTimes
    empty_get: RequestTimes
    streams: int
    body_bytes: int
    upload_bytes_s: float
    download_bytes_s: float
    upload_together_bytes_s: float
    download_together_bytes_s: float
