"""The gradients of a stage as one flat vector, which its replicas sum.

The vector begins with a *head*, extra tensors to be summed alike; the gradients of all trainable parameters follow, in
order. A parameter without a gradient is -0.0 throughout, and no gradient has a -0.0: adding -0.0 changes no number, not
even -0.0. So whatever is cut out of the sum tells of a parameter that it has no gradient anywhere; it keeps
`grad = None`, as in a single process, where optimisers pass over it.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from funcpipe.comm.buffer_pool import block
from funcpipe.errors import PlanError
from funcpipe.training.norms import sum_of_squares

_NO_GRADIENT = -0.0


class Layout:
    """Where the extras and the parameters of a stage lie in its flat vector."""

    def __init__(self, parameters: Sequence[nn.Parameter], extras: Sequence[Tensor]) -> None:
        self.parameters = tuple(parameters)
        self.shapes = tuple(extra.shape for extra in extras)
        dtypes = {tensor.dtype for tensor in (*parameters, *extras)}
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.head = sum(shape.numel() for shape in self.shapes)
        starts = itertools.accumulate((parameter.numel() for parameter in self.parameters), initial=self.head)
        self._starts = tuple(starts)

    @property
    def elements(self) -> int:
        """The length of the vector."""
        return self._starts[-1]

    def place(self, number: int) -> slice:
        """The elements of that parameter."""
        return slice(self._starts[number], self._starts[number + 1])

    def within(self, start: int, stop: int) -> Iterator[int]:
        """The numbers of the parameters that have some of the elements [start, stop)."""
        for number in range(len(self.parameters)):
            if self._starts[number] < stop and self._starts[number + 1] > start:
                yield number


class FlatGradient:
    """The vector of one replica, in which its gradients are made: between `begin` and `take`, a parameter's `grad` is
    its place in the vector, to which the backwards of a step add.

    So a replica holds its gradients once. Those of parameters of another dtype than the vector's are copied into it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], extras: Sequence[Tensor]) -> None:
        """`extras` are the tensors that `take` will be given, or such as have their shapes."""
        self.layout = Layout(parameters, extras)
        self._extra_dtypes = [extra.dtype for extra in extras]
        self._number = {id(parameter): i for i, parameter in enumerate(self.layout.parameters)}
        self._flat = block(self.layout.elements * self.layout.dtype.itemsize).view(self.layout.dtype)
        self._places = [self._place(number) for number in range(len(self.layout.parameters))]
        self._backward: _LastBackward | None = None
        for parameter in self.layout.parameters:
            parameter.register_post_accumulate_grad_hook(self._made)  # type: ignore[no-untyped-call]
        self.begin()

    @property
    def vector(self) -> Tensor:
        """The vector, to be summed over the replicas in its place."""
        return self._flat

    def begin(self) -> None:
        """Begin a step: no parameter has a gradient yet."""
        if self._backward is not None:
            self._backward.join()  # that of a step which was given up
            self._backward = None
        self._flat.fill_(_NO_GRADIENT)
        self._touched = [False] * len(self._places)
        self._taken = [False] * len(self._places)
        for parameter, place in zip(self.layout.parameters, self._places, strict=True):
            parameter.grad = place

    def last_backward(self, compute: Callable[[], None]) -> None:
        """Begin `compute`, the last backward of the step, in a thread; what it has made of the vector is complete.

        `wait_for` and `end_backward` follow it.
        """
        self._backward = _LastBackward(compute)
        self._backward.start()

    def wait_for(self, start: int, stop: int) -> None:
        """Return when the elements [start, stop) behind the head are complete, or the backward has ended.

        An error of the backward is raised here.
        """
        assert self._backward is not None, "last_backward comes first"
        within = tuple(self.layout.within(start, stop))
        if self._backward.wait(lambda: all(self._taken[i] for i in within)):
            self._take_all()

    def end_backward(self) -> bool:
        """Return when the backward has ended; whether there was one."""
        if self._backward is None:
            return False
        self._backward.wait(lambda: False)
        return True

    def take(self, extras: Sequence[Tensor]) -> None:
        """Complete the vector: the gradients that were not complete yet, and the head."""
        self._take_all()
        for view, extra in zip(self._extras(), extras, strict=True):
            view.copy_(extra)

    def squares(self) -> float:
        """The sum of the squares of all gradients, of the summed vector."""
        return sum_of_squares([self._flat[self.layout.head :]])

    def summed(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient of `parameter` in the summed vector, a view of it; None if no replica has one."""
        values = self._values(self._number[id(parameter)])
        return None if is_absent(values) else values.view_as(parameter).to(parameter.dtype)

    def unpack(self) -> tuple[Tensor, ...]:
        """Give every parameter its summed gradient; returns the summed extras."""
        for parameter in self.layout.parameters:
            parameter.grad = self.summed(parameter)
        return self._summed_extras()

    def unpack_parameters(self) -> tuple[Tensor, ...]:
        """Where the updated parameters have taken their gradients' place: set them; returns the summed extras."""
        with torch.no_grad():
            for number, parameter in enumerate(self.layout.parameters):
                parameter.copy_(self._values(number).view_as(parameter))
        return self._summed_extras()

    def _summed_extras(self) -> tuple[Tensor, ...]:
        return tuple(view.to(dtype) for view, dtype in zip(self._extras(), self._extra_dtypes, strict=True))

    def _values(self, number: int) -> Tensor:
        return self._flat[self.layout.place(number)]

    def _extras(self) -> list[Tensor]:
        parts = torch.split(self._flat[: self.layout.head], [shape.numel() for shape in self.layout.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.layout.shapes, strict=True)]

    def _place(self, number: int) -> Tensor | None:
        """Where the gradient of that parameter is made; None if a parameter's gradient cannot have such a dtype."""
        parameter = self.layout.parameters[number]
        return self._values(number).view_as(parameter) if parameter.dtype is self.layout.dtype else None

    def _made(self, parameter: Tensor) -> None:
        """A backward has added to that gradient: the last one, for which somebody may wait, or one before."""
        number = self._number[id(parameter)]
        self._touched[number] = True
        if self._backward is not None:
            with self._backward.news():
                self._take_one(number)

    def _take_one(self, number: int) -> None:
        parameter = self.layout.parameters[number]
        gradient, parameter.grad = parameter.grad, None
        place = self._places[number]
        if gradient is None or (gradient is place and not self._touched[number]):
            return
        if self._taken[number]:
            raise PlanError(
                "a parameter's gradient came in two parts during one backward, the second after the first was sent; "
                "use non-reentrant checkpoints (torch.utils.checkpoint with use_reentrant=False), or a plan whose "
                "synchronisation has one round"
            )
        torch.add(gradient.detach().reshape(-1), 0.0, out=self._values(number))  # which makes 0.0 of -0.0
        self._taken[number] = True

    def _take_all(self) -> None:
        for number in range(len(self._places)):
            self._take_one(number)


def is_absent(values: Tensor) -> bool:
    """Whether no replica had a gradient of the parameter of which `values` is the sum, or a part of it."""
    return not values[:1].any() and bool(values.signbit().all()) and not values.any()


class _LastBackward:
    """A backward in a thread of its own, and who waits for what it makes."""

    def __init__(self, compute: Callable[[], None]) -> None:
        self._compute = compute
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="funcpipe-backward", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self) -> None:
        """Return when it has ended, however."""
        self._thread.join()

    def wait(self, complete: Callable[[], bool]) -> bool:
        """Wait until `complete`, or until the backward has ended: tell which. An error of it is raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or complete())
            if not self._ended:
                return False
        self._thread.join()
        if self._error is not None:
            raise self._error
        return True

    @contextmanager
    def news(self) -> Iterator[None]:
        """What changes within may be waited for."""
        with self._changed:
            yield
            self._changed.notify_all()

    def _run(self) -> None:
        torch.get_num_threads()  # from here on torch's number of threads holds for this one too
        try:
            self._compute()
        except BaseException as error:  # noqa: BLE001 - raised where the end is waited for
            self._error = error
        finally:
            with self.news():
                self._ended = True
