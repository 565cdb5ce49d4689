"""The gradients of a stage as one flat vector, which its replicas sum.

The vector begins with a *head*, extra tensors that are summed too; the gradients of all trainable parameters follow:

    [ extra 0 | extra 1 | gradient of parameter 0, flattened | gradient of parameter 1 | ... ]

A parameter without a gradient is marked by -0.0 in all its elements, and -0.0 in a real gradient is replaced by 0.0.
Adding -0.0 changes no number, not even -0.0, so any range of the sum still shows which parameters have no gradient on
any replica. Those keep `grad = None`, and the optimiser skips them, as in one process. Numbers that the format of the
sums would round to 0 are made 0.0 too, as negative ones would become -0.0 on their way.

The way of a gradient, from the last backward of a step to the optimiser: two replicas stream the sums in two rounds.
Parameters a and b have 4 elements each, and there is no head. These are the tasks of replica 0, which sums split 0:

    vector           [ a0 a1 | a2 a3 | b0 b1 | b2 b3 ]
    (round, split)      1,0     1,1     0,0     0,1         autograd comes to b before a, so b is in round 0

    bucket.s0.r0.m0.k0     starts the last backward in a thread; the hook of b finds b.grad complete and makes its
                           elements final; the task, which waits for those of round 0, ends
    put-split.s0.r0.k0     b2 b3 become a message, for replica 1
    get-split.s0.r0.p1.k0  reads b0 b1 as replica 1 has put them
    merge.s0.r0.k0         b0 b1 are those of both replicas now; a divided optimiser makes them updated parameters
    put-merged.s0.r0.k0    b0 b1 become a message
    get-merged.s0.r0.p1.k0 reads b2 b3, which replica 1 has summed
    backward.s0.r0.m0.k1   has gone on meanwhile; the hook of a; the thread ends
    flatten.s0.r0          a, the head, and what never got a gradient are final: round 1 begins, with a0 a1 | a2 a3
    norm.s0.r0             the sum of all squares, after hooks of parameters, for the other stages
    update.s0.r0           a.grad and b.grad become views of the sums, times the factor that follows from the norm; the
                           optimiser takes its step
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.core import Wire
from funcpipe.errors import PlanError
from funcpipe.training.device import HOST, Device
from funcpipe.training.norms import as_real, sum_of_squares

_NO_GRADIENT = -0.0


class Layout:
    """The elements of a stage's flat vector, by extra tensor and parameter."""

    def __init__(self, parameters: Sequence[nn.Parameter], extras: Sequence[Tensor]) -> None:
        self.parameters = tuple(parameters)
        self.shapes = tuple(extra.shape for extra in extras)
        dtypes = {tensor.dtype for tensor in (*parameters, *extras)}
        self.dtype = torch.float64 if dtypes & {torch.float64, torch.complex128} else torch.float32
        self.head = sum(shape.numel() for shape in self.shapes)
        starts = itertools.accumulate((real_elements(p) for p in self.parameters), initial=self.head)
        self._starts = tuple(starts)

    @property
    def elements(self) -> int:
        """The length of the vector."""
        return self._starts[-1]

    def slice_of(self, number: int) -> slice:
        """Return the elements of parameter `number`."""
        return slice(self._starts[number], self._starts[number + 1])

    def parameters_in(self, start: int, stop: int) -> Iterator[int]:
        """Yield the numbers of the parameters that have elements in [start, stop)."""
        for number in range(len(self.parameters)):
            if self._starts[number] < stop and self._starts[number + 1] > start:
                yield number


class FlatVector:
    """The flat vector of one replica, to be summed over the replicas in place.

    The sums are made on the host. A stage on a device has a vector there too, which is copied before and after.
    """

    def __init__(self, layout: Layout, extra_dtypes: Sequence[torch.dtype], device: Device = HOST) -> None:
        self.layout = layout
        self._extra_dtypes = extra_dtypes
        self._device = device
        self._summed = device.block(layout.elements * layout.dtype.itemsize).view(layout.dtype)
        self._flat = self._summed if device.is_host else device.empty(layout.elements, layout.dtype)

    @property
    def vector(self) -> Tensor:
        """The vector that is summed; shape: [`layout.elements`]."""
        return self._summed

    def fill_head(self, extras: Sequence[Tensor]) -> None:
        """Copy the extra tensors into the head."""
        for view, extra in zip(self._extras(), extras, strict=True):
            view.copy_(extra)

    def fill(self, number: int, values: Tensor) -> None:
        """Copy `values` into the elements of parameter `number`, whose shape they have."""
        self._values(number).copy_(as_real(values).reshape(-1))

    def parameter(self, number: int) -> Tensor:
        """Return the elements of parameter `number` in its shape and dtype."""
        return in_form_of(self.layout.parameters[number], self._values(number))

    def summed_extras(self) -> tuple[Tensor, ...]:
        """Return the head of the vector, which the replicas have summed, as the extra tensors."""
        return tuple(view.to(dtype) for view, dtype in zip(self._extras(), self._extra_dtypes, strict=True))

    def _values(self, number: int) -> Tensor:
        return self._flat[self.layout.slice_of(number)]

    def _extras(self) -> list[Tensor]:
        parts = torch.split(self._flat[: self.layout.head], [shape.numel() for shape in self.layout.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.layout.shapes, strict=True)]


class FlatGradient(FlatVector):
    """The flat vector of one replica's gradients. Between `begin_step` and `complete`, a parameter's `grad` is a view
    of its elements of the vector, to which the backwards of the step add, so gradients exist only once.

    The gradient of a parameter whose dtype is not the vector's is copied into it, a complex one as two numbers for each
    element.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        extras: Sequence[Tensor],
        wire: Wire = Wire.FP32,
        device: Device = HOST,
    ) -> None:
        """`extras` have the shapes and dtypes of the tensors that `complete` will be given; sums are made in `wire`.
        The parameters are on `device`.
        """
        super().__init__(Layout(parameters, extras), [extra.dtype for extra in extras], device)
        self._underflow = wire.underflow if self.layout.dtype is torch.float32 else 0.0
        self._number = {id(parameter): i for i, parameter in enumerate(self.layout.parameters)}
        self._views = [self._view(number) for number in range(len(self.layout.parameters))]
        self._backward: BackwardThread | None = None
        for parameter in self.layout.parameters:
            parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
        self.begin_step()

    def begin_step(self) -> None:
        """Start a step: no parameter has a gradient yet."""
        if self._backward is not None:
            self._backward.join()  # of a step that was given up
            self._backward = None
        self._flat.fill_(_NO_GRADIENT)
        self._not_sent, self._sums_are_here = self.layout.elements, False
        self._has_gradient = [False] * len(self._views)
        self._final = [False] * len(self._views)
        self._computed = [self._device.computed()] * len(self._views)
        for parameter, view in zip(self.layout.parameters, self._views, strict=True):
            parameter.grad = view

    def start_last_backward(self, compute: Callable[[], None]) -> None:
        """Start `compute`, the last backward of the step, in a thread: it makes gradients final one by one.

        `wait_for` and `finish_last_backward` wait for it.
        """
        self._backward = BackwardThread(compute)
        self._backward.start()

    def wait_for(self, start: int, stop: int) -> None:
        """Return once the elements [start, stop), which do not reach into the head, are final.

        Raises the error of the backward.
        """
        assert self._backward is not None, "start_last_backward comes first"
        awaited = tuple(self.layout.parameters_in(start, stop))
        if self._backward.wait_for(lambda: all(self._final[i] for i in awaited)):
            self._make_all_final()
        self._send(start, (self._computed[i] for i in self.layout.parameters_in(start, self._not_sent)))

    def finish_last_backward(self) -> bool:
        """Return once the last backward has ended; False if none was started in this step. Raises its error."""
        if self._backward is None:
            return False
        self._backward.wait_for(lambda: False)
        return True

    def complete(self, extras: Sequence[Tensor]) -> None:
        """Fill in what is missing from the vector: gradients that are not final yet, and the head."""
        self._make_all_final()
        self.fill_head(extras)
        self._send(0, [self._device.computed()])

    def _send(self, start: int, computed: Iterable[Any]) -> None:
        """Copy what is final from element `start` on, once all marks of `computed` are reached, to the vector that is
        summed, unless it was copied before.
        """
        if self._flat is not self._summed and start < self._not_sent:
            part = slice(start, self._not_sent)
            self._device.leave([(self._summed[part], self._flat[part])], computed).synchronize()
        self._not_sent = min(start, self._not_sent)

    def _fetch(self) -> None:
        """Copy the sums to the device, once in a step."""
        if self._flat is not self._summed and not self._sums_are_here:
            self._device.enter(self._flat, self._summed)
        self._sums_are_here = True

    def sum_of_squares(self) -> float:
        """Return the sum of the squares of all gradients in the vector, which the replicas have summed."""
        return sum_of_squares([self._summed[self.layout.head :]])

    def summed(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of `parameter` in the summed vector, a view of it; None if no replica has any."""
        self._fetch()
        number = self._number[id(parameter)]
        absent = is_absent(self._summed[self.layout.slice_of(number)])
        return None if absent else in_form_of(parameter, self._values(number))

    def message(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the same on the host."""
        values = self._summed[self.layout.slice_of(self._number[id(parameter)])]
        return None if is_absent(values) else in_form_of(parameter, values)

    @property
    def summed_weight(self) -> float:
        """The last number of the head, which the replicas have summed."""
        return float(self._summed[self.layout.head - 1].to(self._extra_dtypes[-1]))

    def unpack_gradients(self) -> tuple[Tensor, ...]:
        """Give every parameter its summed gradient; returns the summed extras."""
        self._fetch()
        for parameter in self.layout.parameters:
            parameter.grad = self.summed(parameter)
        return self.summed_extras()

    def unpack_parameters(self) -> tuple[Tensor, ...]:
        """Copy the parameters out of a vector in which updated parameters have replaced the gradients; returns the
        summed extras.
        """
        self._fetch()
        with torch.no_grad():
            for number, parameter in enumerate(self.layout.parameters):
                parameter.copy_(self.parameter(number))
        return self.summed_extras()

    def _view(self, number: int) -> Tensor | None:
        """The elements of parameter `number` as its `grad`; None if the dtypes differ, which torch does not allow."""
        parameter = self.layout.parameters[number]
        return self._values(number).view_as(parameter) if parameter.dtype is self.layout.dtype else None

    def _accumulated(self, parameter: Tensor) -> None:
        """Autograd's hook: a backward has added to the gradient of `parameter`."""
        number = self._number[id(parameter)]
        self._has_gradient[number] = True
        if self._backward is not None:
            with self._backward.updating():
                self._make_final(number)

    def _make_final(self, number: int) -> None:
        parameter = self.layout.parameters[number]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None or (gradient is self._views[number] and not self._has_gradient[number]):
            return
        if self._final[number]:
            raise PlanError(
                "a parameter's gradient came in two parts during one backward, the second after the first was sent; "
                "use non-reentrant checkpoints (torch.utils.checkpoint with use_reentrant=False), or a plan whose "
                "synchronisation has one round"
            )
        place = self._values(number)
        torch.add(as_real(gradient.detach()).reshape(-1), 0.0, out=place)  # turns -0.0 into 0.0
        if self._underflow:
            torch.hardshrink(place, self._underflow, out=place)
        self._computed[number] = self._device.computed()
        self._final[number] = True

    def _make_all_final(self) -> None:
        for number in range(len(self._views)):
            self._make_final(number)


def real_elements(parameter: Tensor) -> int:
    """Return the number of real numbers that `parameter` holds."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def in_form_of(parameter: Tensor, values: Tensor) -> Tensor:
    """Return elements of the vector in the shape and dtype of `parameter`."""
    if not parameter.is_complex():
        return values.view_as(parameter).to(parameter.dtype)
    return torch.complex(values[::2], values[1::2]).view(parameter.shape).to(parameter.dtype)


def is_absent(values: Tensor) -> bool:
    """Return True if no replica had a gradient of a parameter, whose summed gradient, or a part of it, is `values`."""
    return not values[:1].any() and bool(values.signbit().all()) and not values.any()


class BackwardThread:
    """Runs `compute`, a backward, and lets other threads wait for what it has completed so far."""

    def __init__(self, compute: Callable[[], None]) -> None:
        self._compute = compute
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="funcpipe-backward", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self) -> None:
        """Return once the backward has ended, even with an error."""
        self._thread.join()

    def wait_for(self, complete: Callable[[], bool]) -> bool:
        """Wait until `complete()` or the end of the backward; true if it has ended. Raises the backward's error."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or complete())
            if not self._ended:
                return False
        self._thread.join()
        if self._error is not None:
            raise self._error
        return True

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Let the objects of `wait_for` change within this context; those who wait check again when it ends."""
        with self._changed:
            yield
            self._changed.notify_all()

    def _run(self) -> None:
        torch.get_num_threads()  # makes torch apply its number of threads to this thread too
        try:
            self._compute()
        except BaseException as error:  # noqa: BLE001 - raised where the end is waited for
            self._error = error
        finally:
            with self.updating():
                self._ended = True
