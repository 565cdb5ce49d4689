"""What each kind of task does in a worker: a call of its computation, a message through its channel, or both."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from funcpipe.comm.channel import Channel, Received
from funcpipe.comm.collectives import cut_rounds, pattern
from funcpipe.comm.gradient_chunks import GradientChunks
from funcpipe.core import Plan, Routes, Wire
from funcpipe.runstate.keys import Keys
from funcpipe.scheduler.execute import TaskResult
from funcpipe.scheduler.tasks import Kind, Task, source_of
from funcpipe.training.computation import Batch, Computation
from funcpipe.training.data import Step
from funcpipe.worker.synchronisation import Synchronisation


class Actions:
    """Does the tasks of one worker. Messages are named after the tasks that write them."""

    def __init__(
        self, computation: Computation, channel: Channel, keys: Keys, routes: Routes, plan: Plan, replica: int
    ) -> None:
        self._computation = computation
        self._channel = channel
        self._keys = keys
        self._wire, self._gradient_wire = plan.wire, plan.gradient_wire
        self._routes = _RouteTable(routes)
        self._pattern = pattern(plan.sync, plan.replicas, plan.streams)
        self._synchronisation = Synchronisation(channel, self._pattern, replica, self._key_of, computation.merged)
        self._step = -1
        self._pieces: GradientChunks | None = None
        self._actions: Mapping[Kind, Callable[[Task], TaskResult]] = {
            Kind.FORWARD: self._forward,
            Kind.BUCKET: self._bucket,
            Kind.BACKWARD: self._backward,
            Kind.PUT_ACTIVATION: self._put_activation,
            Kind.GET_ACTIVATION: self._get_activation,
            Kind.PUT_GRADIENT: self._put_gradient,
            Kind.GET_GRADIENT: self._get_gradient,
            Kind.GET_TIED: self._get_tied,
            Kind.ADD_TIED: self._add_tied,
            Kind.PUT_TIED: self._put_tied,
            Kind.FLATTEN: self._flatten,
            Kind.PUT_SPLIT: self._synchronise,
            Kind.GET_SPLIT: self._synchronise,
            Kind.MERGE: self._synchronise,
            Kind.PUT_MERGED: self._synchronise,
            Kind.GET_MERGED: self._synchronise,
            Kind.PUT_TIED_SUM: self._put_tied_sum,
            Kind.GET_TIED_SUM: self._get_tied_sum,
            Kind.NORM: self._measure_norm,
            Kind.PUT_NORM: self._put_norm,
            Kind.GET_NORM: self._get_norm,
            Kind.UPDATE: self._update,
        }

    def begin(self, step: Step, load: Callable[[Sequence[int]], Batch]) -> None:
        """Get ready for the tasks of `step`."""
        self._step = step.number
        self._pieces = None
        self._channel.begin_step()
        self._computation.begin(step, load)

    def run(self, task: Task) -> TaskResult:
        """Do `task`."""
        torch.get_num_threads()  # from here on torch's number of threads holds for the thread of this lane too
        return self._actions[task.kind](task)

    def _forward(self, task: Task) -> TaskResult:
        self._computation.forward(_number(task.micro_batch))
        return TaskResult()

    def _backward(self, task: Task) -> TaskResult:
        self._computation.backward(_number(task.micro_batch))
        return TaskResult()

    def _bucket(self, task: Task) -> TaskResult:
        bucket = _number(task.part)
        if bucket == 0:
            self._computation.begin_last_backward(_number(task.micro_batch))
            self._cut()
        self._computation.flat.wait_for(*self._rounds[bucket])
        return TaskResult()

    def _flatten(self, _: Task) -> TaskResult:
        self._computation.flatten()
        self._cut()
        return TaskResult()

    def _cut(self) -> None:
        """Cut the step's gradients as they travel, unless it was done for its buckets."""
        flat = self._computation.flat
        if self._pieces is None:
            self._pieces = GradientChunks(flat.vector, self._pattern, flat.layout.head)
            self._rounds = cut_rounds(flat.vector.numel(), self._pattern, flat.layout.head)

    def _synchronise(self, task: Task) -> TaskResult:
        assert self._pieces is not None, f"{task} comes before its gradients"
        return self._synchronisation.run(task, self._pieces)

    def _update(self, _: Task) -> TaskResult:
        self._computation.update()
        return TaskResult()

    def _measure_norm(self, _: Task) -> TaskResult:
        self._computation.measure_norm()
        return TaskResult()

    def _add_tied(self, _: Task) -> TaskResult:
        self._computation.tied.add()
        return TaskResult()

    def _put_activation(self, task: Task) -> TaskResult:
        names = self._routes.activation[task.stage, _number(task.part)]
        return self._put(task, self._computation.activations(_number(task.micro_batch), names), wire=self._wire)

    def _put_gradient(self, task: Task) -> TaskResult:
        names = self._routes.gradient[task.stage, _number(task.peer)]
        return self._put(
            task, self._computation.owed_gradients(_number(task.micro_batch), names), wire=self._gradient_wire
        )

    def _put_tied(self, task: Task) -> TaskResult:
        names = self._routes.tied[_number(task.part)]
        return self._put(task, self._computation.tied.gradients(names), wire=Wire.FP32)

    def _put_tied_sum(self, task: Task) -> TaskResult:
        names = self._routes.tied[_number(task.part)]
        return self._put(task, self._computation.tied_sums(names), wire=Wire.FP32)

    def _put_norm(self, task: Task) -> TaskResult:
        squares = torch.tensor(self._computation.norm.squares(task.stage), dtype=torch.float64)
        return self._put(task, {"squares": squares}, wire=Wire.FP32)

    def _get_activation(self, task: Task) -> TaskResult:
        received = self._get(task)
        self._computation.receive_activation(_number(task.micro_batch), received.tensors)
        return _outcome(received)

    def _get_gradient(self, task: Task) -> TaskResult:
        received = self._get(task)
        self._computation.receive_gradient(_number(task.micro_batch), _number(task.peer), received.tensors)
        return _outcome(received)

    def _get_tied(self, task: Task) -> TaskResult:
        received = self._get(task)
        self._computation.tied.receive(received.tensors)
        return _outcome(received)

    def _get_tied_sum(self, task: Task) -> TaskResult:
        received = self._get(task)
        self._computation.tied.receive_sums(received.tensors)
        return _outcome(received)

    def _get_norm(self, task: Task) -> TaskResult:
        received = self._get(task)
        self._computation.norm.keep(_number(task.peer), received.tensors["squares"].item())
        return _outcome(received)

    def _put(self, task: Task, tensors: Mapping[str, Tensor], *, wire: Wire) -> TaskResult:
        return TaskResult(self._channel.put(self._key_of(task), tensors, wire=wire))

    def _get(self, task: Task) -> Received:
        return self._channel.get(self._key_of(source_of(task)))

    def _key_of(self, put: Task) -> str:
        return self._keys.message(f"s{put.stage}.r{put.replica}", self._step, str(put))


class _RouteTable:
    """The names of the tensors in each object: by (producer stage, part), by (consumer stage, producer stage), and by
    the number of the route of tied parameters.
    """

    def __init__(self, routes: Routes) -> None:
        self.activation = {(route.producer, part): route.tensors for part, route in routes.numbered_activations()}
        self.tied = [route.parameters for route in routes.ties]
        self.gradient = {(route.consumer, route.producer): route.tensors for route in routes.gradients}


def _outcome(received: Received) -> TaskResult:
    return TaskResult(received.payload_bytes, received.waited_s)


def _number(value: int | None) -> int:
    assert value is not None, "the task lacks a number that tasks of its kind have"
    return value
