"""The action of a worker for each kind of task: a call of its computation, a message through its channel, or both."""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from funcpipe.comm.channel import Channel, Received
from funcpipe.comm.collectives import pattern_of
from funcpipe.comm.gradient_chunks import GradientChunks, cut_unit
from funcpipe.comm.int8_chunks import gradient_chunks
from funcpipe.comm.piece_ranges import round_ranges
from funcpipe.core import Plan, Routes, Wire, worker_name
from funcpipe.runstate.keys import Keys
from funcpipe.scheduler.execute import TaskResult
from funcpipe.scheduler.tasks import Kind, Task, source_of
from funcpipe.training.batches import Step
from funcpipe.training.computation import Computation
from funcpipe.training.loading import Loader
from funcpipe.training.local_steps import LateMeeting, Meetings
from funcpipe.training.output_cache import OutputCache
from funcpipe.worker.message_copies import MessageCopies
from funcpipe.worker.synchronisation import Synchronisation, result_of


class Actions:
    """Runs the tasks of one worker. A message is named after the task that puts it.

    An attempt that repeats steps leaves the messages that are there as they are, and goes on with what they say where
    it would otherwise go on with its own: others have read them, and this processor may round otherwise.
    """

    def __init__(
        self,
        computation: Computation,
        channel: Channel,
        keys: Keys,
        routes: Routes,
        plan: Plan,
        stage: int,
        replica: int,
        loader: Loader | None = None,
        meetings: Meetings | None = None,
    ) -> None:
        """`loader` is there where the stage loads data, `meetings` where replicas train alone."""
        self._computation = computation
        self._passes = computation.passes
        self._channel = channel
        self._loader = loader
        self._keys = keys
        self._plan = plan
        self._routes = _RouteTable(routes)
        self._pattern = pattern_of(plan, stage)
        self._synchronisation = Synchronisation(channel, self._pattern, replica, self._key_of, computation.update_split)
        self._step = -1
        self._chunks: dict[tuple[int, int | None], GradientChunks] = {}
        self._messages = MessageCopies(computation.device, take=self._take, receive=self._receive)
        self._meetings = meetings
        self._late: LateMeeting | None = None
        self._actions: Mapping[Kind, Callable[[Task], TaskResult]] = {
            Kind.LOAD: self._load,
            Kind.FORWARD: self._forward,
            Kind.BUCKET: self._bucket,
            Kind.BACKWARD: self._backward,
            Kind.PUT_OUTPUTS: self._put_outputs,
            Kind.GET_OUTPUTS: self._get_outputs,
            Kind.JOINT_LOSS: self._joint_loss,
            Kind.PUT_ACTIVATION: self._put_activation,
            Kind.GET_ACTIVATION: self._get_message,
            Kind.PUT_GRADIENT: self._put_gradient,
            Kind.GET_GRADIENT: self._get_message,
            Kind.ACTIVATION_TO_HOST: self._messages.to_host,
            Kind.ACTIVATION_TO_DEVICE: self._messages.to_device,
            Kind.GRADIENT_TO_HOST: self._messages.to_host,
            Kind.GRADIENT_TO_DEVICE: self._messages.to_device,
            Kind.GET_TIED: self._get_tied,
            Kind.ADD_TIED: self._add_tied,
            Kind.PUT_TIED: self._put_tied,
            Kind.LOCAL_UPDATE: self._local_update,
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

    def adopt(self, written: Collection[str]) -> None:
        """Repeat steps in which earlier attempts have put messages with the keys `written`."""
        self._channel.adopt(written)
        self._chunks = {}

    @property
    def goes_on(self) -> bool:
        """True unless the step begins anew with a late meeting of which it has none of what went on before."""
        return self._late is None or self._step == self._late.measured + 1 or bool(self._chunks)

    def begin_step(self, step: Step) -> None:
        """Start `step`."""
        self._step = step.number
        self._late = None if self._meetings is None else self._meetings.late(step.number)
        begins = self._late is None or self._step == self._late.measured + 1
        self._chunks = {key: own for key, own in self._chunks.items() if key[1] is not None and not begins}
        self._channel.begin_step()
        self._messages.begin()
        self._computation.begin_step(step, lambda micro_batch: self._loads.take(step.number, micro_batch))

    def run(self, task: Task) -> TaskResult:
        """Run `task`."""
        torch.get_num_threads()  # makes torch apply its number of threads to this lane's thread too
        return self._actions[task.kind](task)

    @property
    def _loads(self) -> Loader:
        assert self._loader is not None, "only stages that read data or compute the loss load data"
        return self._loader

    def _load(self, task: Task) -> TaskResult:
        return TaskResult(ago_s=self._loads.load(self._step + (task.part or 0), _required(task.micro_batch)))

    def _forward(self, task: Task) -> TaskResult:
        self._computation.forward(_required(task.micro_batch))
        return TaskResult()

    def _backward(self, task: Task) -> TaskResult:
        self._computation.backward(_required(task.micro_batch))
        return TaskResult()

    def _put_outputs(self, task: Task) -> TaskResult:
        return self._put(task, self._outputs.message(), wire=Wire.FP32)

    def _get_outputs(self, task: Task) -> TaskResult:
        received = self._get(task)
        self._outputs.receive(received.tensors)
        return result_of(received)

    def _joint_loss(self, task: Task) -> TaskResult:
        key = self._key_of(Task(Kind.PUT_OUTPUTS, task.stage, task.replica))
        if self._channel.has_written(key):
            self._outputs.receive(self._channel.get(key).tensors)
        self._computation.joint_loss()
        return TaskResult()

    @property
    def _outputs(self) -> OutputCache:
        assert self._passes.cache is not None, "only the last stage of a plan with a joint loss keeps outputs"
        return self._passes.cache

    def _bucket(self, task: Task) -> TaskResult:
        bucket = _required(task.part)
        if bucket == 0:
            self._computation.start_last_backward(_required(task.micro_batch))
            self._cut(0)
        self._computation.flat.wait_for(*self._rounds[bucket])
        return TaskResult()

    def _flatten(self, task: Task) -> TaskResult:
        self._computation.flatten(task.fragment or 0, late=task.delay is not None)
        self._cut(task.fragment or 0, task.delay)
        return TaskResult()

    def _cut(self, fragment: int, delay: int | None = None) -> None:
        """Cut the flat vector of a fragment into chunks, unless the buckets of its gradients have been cut already."""
        if (fragment, delay) not in self._chunks:
            flat = self._computation.vector(fragment)
            wire, merged_wire, head = self._plan.wire_sync, self._plan.merged_wire, flat.layout.head
            self._chunks[fragment, delay] = gradient_chunks(
                flat.vector,
                self._pattern,
                head,
                wire=wire,
                merged_wire=merged_wire,
                feedback=self._computation.feedback(fragment),
            )
            self._rounds = round_ranges(flat.vector.numel(), self._pattern, head, cut_unit(wire))

    def _synchronise(self, task: Task) -> TaskResult:
        return self._synchronisation.run(task, self._chunks[task.fragment or 0, task.delay])

    def _local_update(self, _: Task) -> TaskResult:
        self._computation.local_update()
        return TaskResult()

    def _update(self, _: Task) -> TaskResult:
        self._computation.update()
        return TaskResult()

    def _measure_norm(self, task: Task) -> TaskResult:
        self._computation.measure_norm()
        key = self._key_of(Task(Kind.PUT_NORM, task.stage, task.replica))
        if self._channel.has_written(key):
            self._add_norm(task.stage, self._channel.get(key).tensors)
        return TaskResult()

    def _add_tied(self, task: Task) -> TaskResult:
        self._computation.tied.add_received()
        if not self._plan.sums_gradients:  # or else the sums over replicas are read again
            for part in range(len(self._routes.tied)):
                key = self._key_of(Task(Kind.PUT_TIED_SUM, task.stage, task.replica, part=part))
                if self._channel.has_written(key):
                    self._computation.tied.replace(self._channel.get(key).tensors)
        return TaskResult()

    def _put_activation(self, task: Task) -> TaskResult:
        return self._put(task, self._messages.sent(task), wire=self._plan.wire)

    def _put_gradient(self, task: Task) -> TaskResult:
        return self._put(task, self._messages.sent(task), wire=self._plan.gradient_wire)

    def _take(self, task: Task) -> Mapping[str, Tensor]:
        """Take the message that `task` puts, or copies to the host."""
        micro_batch = _required(task.micro_batch)
        if task.kind in (Kind.PUT_ACTIVATION, Kind.ACTIVATION_TO_HOST):
            names = self._routes.activation[task.stage, _required(task.part)]
            return self._passes.take_activations(micro_batch, names)
        return self._passes.take_gradients(micro_batch, self._routes.gradient[task.stage, _required(task.peer)])

    def _put_tied(self, task: Task) -> TaskResult:
        names = self._routes.tied[_required(task.part)]
        return self._put(task, self._computation.tied.gradients(names), wire=Wire.FP32)

    def _put_tied_sum(self, task: Task) -> TaskResult:
        again, part = divmod(_required(task.part), len(self._routes.tied))
        names = self._routes.tied[part]
        sums = self._computation.tied_changes(names) if again else self._computation.tied_sums(names)
        return self._put(task, sums, wire=Wire.FP32)

    def _put_norm(self, task: Task) -> TaskResult:
        norm = self._computation.norm
        norms = {"squares": norm.squares(task.stage)}
        if task.stage == len(self._plan.stages) - 1 and norm.weight is not None:
            norms["weight"] = norm.weight
        tensors = {name: torch.tensor(number, dtype=torch.float64) for name, number in norms.items()}
        return self._put(task, tensors, wire=Wire.FP32)

    def _get_message(self, task: Task) -> TaskResult:
        received = self._get(task)
        self._messages.got(task, received.tensors)
        return result_of(received)

    def _receive(self, task: Task, tensors: Mapping[str, Tensor]) -> None:
        """Give the stage the message that `task` gets, or copies to the device."""
        micro_batch = _required(task.micro_batch)
        if task.kind in (Kind.GET_ACTIVATION, Kind.ACTIVATION_TO_DEVICE):
            self._passes.receive_activation(micro_batch, tensors)
        else:
            self._passes.receive_gradient(micro_batch, _required(task.peer), tensors)

    def _get_tied(self, task: Task) -> TaskResult:
        received = self._get(task)
        self._computation.tied.receive(received.tensors)
        return result_of(received)

    def _get_tied_sum(self, task: Task) -> TaskResult:
        received = self._get(task)
        self._computation.tied.receive_sums(received.tensors, late=task.delay is not None)
        return result_of(received)

    def _get_norm(self, task: Task) -> TaskResult:
        received = self._get(task)
        self._add_norm(_required(task.peer), received.tensors)
        return result_of(received)

    def _add_norm(self, stage: int, norms: Mapping[str, Tensor]) -> None:
        """Add a stage's norm of its gradient and, from the last stage, the weight of the loss."""
        self._computation.norm.add_stage(stage, norms["squares"].item())
        if "weight" in norms:
            self._computation.norm.add_weight(norms["weight"].item())

    def _put(self, task: Task, tensors: Mapping[str, Tensor], *, wire: Wire) -> TaskResult:
        return TaskResult(self._channel.put(self._key_of(task), tensors, wire=wire))

    def _get(self, task: Task) -> Received:
        return self._channel.get(self._key_of(source_of(task)))

    def _key_of(self, put: Task) -> str:
        """Return the key of an object; those of a late meeting count in the step that ends it."""
        step = self._step if put.delay is None or self._late is None else self._late.taken
        return self._keys.message(worker_name(put.stage, put.replica), step, str(put))


class _RouteTable:
    """The names of the tensors in each object: by (producer stage, part), by (consumer stage, producer stage), and by
    the number of the route of tied parameters.
    """

    def __init__(self, routes: Routes) -> None:
        self.activation = {(route.producer, part): route.tensors for part, route in routes.numbered_activations()}
        self.tied = [route.parameters for route in routes.ties]
        self.gradient = {(route.consumer, route.producer): route.tensors for route in routes.gradients}


def _required(value: int | None) -> int:
    assert value is not None, "the task lacks a number that tasks of its kind have"
    return value
