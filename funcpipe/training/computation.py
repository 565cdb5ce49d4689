"""All that one replica of one stage computes in a training step, task by task.

The passes add up gradients; `flat` sums them over replicas, `tied` over stages that share parameters; hooks of
parameters run on the sums; `norm` is that of the whole model; the optimiser and the running statistics take their step
with the sums. Every order of tasks that the graph of the step allows gives the same bits.

A replica that trains alone computes as a single one does, and `outer` is what it keeps until it meets the others.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from funcpipe.comm.error_feedback import ErrorFeedback
from funcpipe.comm.gradient_chunks import cut_unit
from funcpipe.comm.sum_pattern import Pattern
from funcpipe.core import Coupled, OnNan, TieRoute, Wire
from funcpipe.model.split import StageModule
from funcpipe.training.averaging import TeacherUpdate, WeightAverage
from funcpipe.training.batches import Step
from funcpipe.training.carried import RunningStatistics
from funcpipe.training.device import HOST, Device
from funcpipe.training.fragments import Fragments
from funcpipe.training.gradients import FlatGradient, FlatVector, Layout
from funcpipe.training.local_steps import Meetings
from funcpipe.training.norms import Finiteness, GradientNorm, sum_of_squares
from funcpipe.training.optimizers import ParameterShape
from funcpipe.training.output_cache import BatchLayout, OutputCache
from funcpipe.training.parameter_hooks import NO_HOOKS, NamedHooks, ParameterHooks
from funcpipe.training.passes import Batch, Passes
from funcpipe.training.recipe import Recipe
from funcpipe.training.sharding import residuals_of
from funcpipe.training.stage_optimizer import StageOptimizer, trainable_parameters
from funcpipe.training.state import StageState, on_device
from funcpipe.training.tied import TiedParameters


class Computation:
    """The parts of one replica's computation, and what they do together."""

    _average: WeightAverage | None = None
    _flat: FlatGradient | None = None
    outer: Fragments | None = None
    _steps_done = 0
    _changes = False

    def __init__(
        self,
        stage: StageModule,
        *,
        recipe: Recipe,
        seed: int,
        recompute: bool,
        replica: int,
        replicas: int,
        stage_number: int = 0,
        ties: Sequence[TieRoute] = (),
        norm: GradientNorm | None = None,
        shards: Pattern | None = None,
        whole: Sequence[ParameterShape] = (),
        wire_sync: Wire = Wire.FP32,
        summed_as: Pattern | None = None,
        hooks: NamedHooks = NO_HOOKS,
        layout: BatchLayout | None = None,
        meetings: Meetings | None = None,
        device: Device = HOST,
    ) -> None:
        """Stage `stage_number` of the model, which sums the gradients of its parameters in `ties` with other stages.

        With `norm`, the step depends on the norm of all stages' gradients. With `shards`, the optimiser is divided over
        the replicas as that pattern cuts the gradient. `whole` are the trainable parameters of the model, which the
        optimiser's factory sees in every stage. Gradients are summed in the format `wire_sync`, in 8 bits as the
        pattern `summed_as` says. `layout` says how outputs lie side by side, for a loss of the whole batch. Where
        `meetings` are given, replicas train alone in between. The stage is on `device`.
        """
        self._stage_number = stage_number
        self.device = device
        self._replica = replica
        self._replicas = replicas
        self.parameters = tuple(tensor for name, tensor in stage.named_parameters() if name not in stage.fixed)
        trained = {name: p for name, p in stage.named_parameters() if p.requires_grad}
        self._finiteness = Finiteness(recipe.on_nan, stage_number, trained)
        self._undoes = recipe.on_nan is OnNan.SKIP
        self._weighs = recipe.is_weighted and stage.is_last
        self.norm = norm or GradientNorm()
        summed = [item for item in stage.statistics if replicas > 1 or item.again]
        self._statistics = RunningStatistics(stage, summed)
        caches = stage.is_last and recipe.coupled is Coupled.CACHE
        self.passes = Passes(
            stage,
            recipe=recipe,
            seed=seed,
            recompute=recompute,
            finiteness=self._finiteness,
            statistics=[item for item in stage.statistics if item not in summed],
            cache=OutputCache(recipe.cast_loss, layout, seed=seed) if caches else None,
            alone=meetings is not None,
            device=device,
        )
        self.tied = TiedParameters(stage, ties, stage_number, device)
        self._summed_here = [p for p in self.parameters if p.requires_grad and not self.tied.is_borrowed(p)]
        layouts = self._prepare_sums(meetings, trained, wire_sync, shards)
        self._residuals = residuals_of(layouts, wire_sync, shards or summed_as, replica)
        self._hooks = ParameterHooks(hooks, trainable_parameters(stage, {shape.name for shape in whole}), seed=seed)
        self._optimizer = StageOptimizer(stage, recipe, whole, seed=seed, device=device)
        self._teachers = TeacherUpdate(recipe.teachers, stage)
        if recipe.average is not None:
            self._average = WeightAverage(recipe.average, stage, self._teachers.parameters)
        if shards is not None and meetings is None:
            self._optimizer.divide(self.flat.layout, shards, replica, cut_unit(wire_sync))

    def _prepare_sums(
        self, meetings: Meetings | None, trained: Mapping[str, nn.Parameter], wire: Wire, shards: Pattern | None
    ) -> list[Layout]:
        """Make what replicas sum, if there are several; return how it lies, of each fragment if they train alone."""
        if meetings is not None:
            together = {id(parameter) for parameter in self.tied.parameters}
            divided = None if shards is None else (shards, self._replica)
            parts = meetings, trained, self._summed_here, self._statistics.kept()
            self.outer = Fragments(*parts, together=together, divided=divided)
            return [step.layout for step in self.outer.steps]
        if self._replicas == 1:
            return []
        self._flat = FlatGradient(self._summed_here, self._extras(), wire, self.device)
        return [self._flat.layout]

    def begin_step(self, step: Step, take: Callable[[int], Batch], own: Iterable[int] | None = None) -> None:
        """Start a step; `take` gives what was loaded of a micro-batch, where the stage needs data.

        `own` are the micro-batches that this replica computes, by default every one whose turn it is among replicas.
        """
        self._step, self._changes = step, bool(self._residuals) and self.outer is None
        in_round = self.outer is not None and self.outer.goes_on
        if own is None:
            own = range(self._replica, len(step.micro_batches), self._replicas)
        self.passes.begin_step(step, own, take)
        self._statistics.begin_step(len(step.micro_batches), goes_on=in_round)
        self._hooks.begin_step(step.number)
        if self._flat is not None:
            self._flat.begin_step()
        if self.outer is not None:
            self.outer.begin_step()

    def forward(self, micro_batch: int) -> None:
        """Compute what later stages need of `micro_batch` and, in the last stage, its loss."""
        self.passes.forward(micro_batch)
        self._statistics.after_forward(micro_batch)

    def joint_loss(self) -> None:
        """Compute the loss of the whole global batch, once the outputs of all micro-batches are there."""
        self.passes.joint_loss(loss_factor=self.norm.loss_factor)

    def backward(self, micro_batch: int) -> None:
        """Add this micro-batch's part to the gradients; if it is the one that has been started, wait for its end."""
        if self._flat is None or not self._flat.finish_last_backward():
            self._propagate(micro_batch)

    def start_last_backward(self, micro_batch: int) -> None:
        """Start the step's last `backward` in a thread: it makes elements of `flat` final one after the other."""
        self.flat.start_last_backward(lambda: self._propagate(micro_batch))

    def _propagate(self, micro_batch: int) -> None:
        self.passes.backward(micro_batch, loss_factor=self.norm.loss_factor)
        self.tied.after_backward()

    def flatten(self, fragment: int = 0, *, late: bool = False) -> None:
        """Complete the vector of what the replicas sum: of one fragment if they train alone, as was kept if `late`."""
        if self.outer is None:
            self.flat.complete(self._extras())
        elif late:
            self.outer.steps[fragment].measure_held()
        else:
            self.outer.steps[fragment].measure({} if fragment else self._statistics.kept())

    @property
    def flat(self) -> FlatGradient:
        """The vector of the step's gradients, which the replicas sum; there is none with a replica that is alone."""
        assert self._flat is not None, "a single replica sums nothing"
        return self._flat

    def vector(self, fragment: int = 0) -> FlatVector:
        """Return what the replicas sum: the step's gradients, or what has changed of a fragment since they met last."""
        return self.flat if self.outer is None else self.outer.steps[fragment].changes

    @property
    def shared_parameters(self) -> Iterable[Tensor]:
        """The parameters that are the same in all replicas, on the host; those of a device are read one by one."""
        return map(self.device.read, self.parameters) if self.outer is None else self.outer.shared

    @property
    def is_sharded(self) -> bool:
        """True if this replica keeps only a part of the optimiser's state."""
        return self._optimizer.is_sharded

    def feedback(self, fragment: int = 0) -> ErrorFeedback | None:
        """Return the rounding errors that this replica keeps of sums in 8 bits; None if they are not made so."""
        return self._residuals[fragment].feedback if fragment in self._residuals else None

    @property
    def saves_part(self) -> bool:
        """True if each replica has something to save that others do not have."""
        return self.has_own_optimizer or bool(self._residuals)

    @property
    def has_own_optimizer(self) -> bool:
        """True if each replica's optimiser has a state of its own."""
        return self.is_sharded or self.outer is not None

    @property
    def learning_rate(self) -> float | None:
        """The learning rate of the optimiser's first group in the last step; None if there is none."""
        return self._optimizer.learning_rate

    def update_split(self, fragment: int, round_number: int, values: Tensor) -> None:
        """Replace what this replica has summed in a round by the updated parameters, if that step is divided."""
        self._changes = True
        if self.outer is not None:
            self.outer.steps[fragment].take(round_number, values)
            return
        if self.is_sharded:
            self._finiteness.check_split(values, self._step.number)
        self._optimizer.update_split(round_number, values)

    def tied_sums(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the gradients of the whole global batch of tied parameters that this stage sums."""
        if self._flat is None:
            return self.tied.gradients(names)
        sums = {name: self._flat.message(self.tied.parameter(name)) for name in names}
        return {name: gradient for name, gradient in sums.items() if gradient is not None}

    def tied_changes(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return what training has changed tied parameters by since the replicas met last, which this stage sums."""
        assert self.outer is not None, "replicas that sum gradients sum no changes"
        return {name: self.outer.steps[0].summed(self.tied.parameter(name)) for name in names}

    def measure_norm(self) -> None:
        """Record the squares of the gradients that this stage sums; tied ones count in one stage only."""
        if self._flat is not None and not self._hooks:
            own = self._flat.sum_of_squares()
        else:
            own = sum_of_squares(map(self._hooked, self._summed_here))
        self.norm.add_stage(self._stage_number, own)
        if self._weighs:
            weight = self.passes.weight if self._flat is None else self._flat.summed_weight
            self.norm.add_weight(weight / self._step.samples)

    def _hooked(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient of a parameter that this stage sums, as its hooks leave it; the sum stays, for other stages."""
        summed = parameter.grad if self._flat is None else self._flat.summed(parameter)
        return self._hooks.gradient(parameter, summed, loss_factor=self.norm.loss_factor)

    def update(self) -> None:
        """Take the step of the optimiser and of the running statistics, with the sums over the whole global batch; or
        go on from where replicas have met.

        Raises NotFinite if these are not finite, and that is to end the run.
        """
        self._changes = True
        if self.outer is None:
            self._take_step(self._unpack())
        elif not self.outer.meetings.is_after(self._step.number):
            self.local_update()
            self._hold()
        else:
            self._join(self.outer.meet(self._step.number, self._borrowed(late=False)))
        self._steps_done = self._step.number + 1

    def local_update(self) -> None:
        """Take the step of the optimiser with this replica's own gradients, before it meets the others, and the outer
        step that is due late. Raises as `update` does.
        """
        assert self.outer is not None, "replicas that sum gradients have no update of their own"
        self._changes = True
        self._take_step(None)
        self._join(self.outer.meet_late(self._step.number, self._borrowed(late=True)))
        for number, residuals in self._residuals.items():
            if not self.outer.steps[number].is_held:
                residuals.release()

    def _borrowed(self, *, late: bool) -> Callable[[nn.Parameter], Tensor]:
        """Return what gives the sums of borrowed parameters, which other stages have made."""
        sums = {id(self.tied.parameter(name)): total for name, total in self.tied.take_sums(late=late).items()}
        return lambda parameter: sums[id(parameter)]

    def _join(self, statistics: Sequence[Tensor] | None) -> None:
        """Set running statistics to those on which replicas have met, if they have."""
        if statistics is not None:
            self._statistics.finish_step(list(statistics))

    def _hold(self) -> None:
        """Keep what replicas meet on late, if a round of some parameters ends here."""
        assert self.outer is not None, "replicas that sum gradients do not meet"
        fragment = self.outer.meetings.measured_after(self._step.number)
        if fragment is None:
            return
        self.outer.steps[fragment].hold({} if fragment else self._statistics.kept())
        if fragment in self._residuals:
            self._residuals[fragment].hold()
        if not fragment:
            self._statistics.begin_anew()

    def _take_step(self, statistics: list[Tensor] | None) -> None:
        """Take the step with the gradients that are there, and with the summed `statistics`; None keeps those of this
        replica until it meets the others.
        """
        if self._weighs and self.norm.weight is not None:
            self.passes.loss_sum = self.passes.loss_sum / self.norm.weight if self.norm.weight else math.nan
        self.tied.finish_step()
        self._hooks.replace_gradients(loss_factor=self.norm.loss_factor)
        if not self.is_sharded:
            self._finiteness.check_gradients(self.norm, self._step.number)
        self._optimizer.step(self._step, gradient_factor=self.norm.finish_step())
        undo = self._undoes and self.norm.skipped
        if undo:
            self._statistics.undo_step()
            for residuals in self._residuals.values():
                residuals.feedback.clear()
        else:
            if statistics is None:
                self._statistics.keep_step()
            else:
                self._statistics.finish_step(statistics)
            self._teachers.after_step(self._step.number)
        if self._average is not None:
            self._average.update(self._step.number + 1)
        self.passes.end_step(undo=undo)

    def go_back(self) -> bool:
        """Go back to the beginning of a step that was cut short; whether that could be done.

        It cannot once anything has changed but what forwards leave for the next ones: an optimiser has taken its step,
        or sums in 8 bits have kept what they round off.
        """
        if not self._changes:
            self._statistics.undo_step()
            self.passes.end_step(undo=True)
            if self.outer is not None:
                self.outer.undo_step()
        return not self._changes

    def after_validation(self, values: Mapping[str, float]) -> None:
        """Pass the results of a validation, by name, to the schedule, between two steps and in all stages.

        Raises DataError if the value that the schedule monitors is not there.
        """
        self._optimizer.after_validation(values)

    def check_finite(self) -> None:
        """Raise NotFinite if parameters are not finite, between two steps, unless that is to be ignored."""
        self._finiteness.check_parameters(self._steps_done)

    def state(self) -> StageState:
        """Return what `begin_state` gives; it lasts until the next step or the next state."""
        with self.begin_state() as state:
            return state

    def begin_state(self) -> AbstractContextManager[StageState]:
        """Give the stage's state between two steps, on the host; of a divided optimiser, this replica's shard.

        See `StateCopy`. Raises NotFinite if parameters are not finite, unless that is to be ignored.
        """
        self.check_finite()
        return self._optimizer.begin_state(self.norm, self._completed)

    def _completed(self, state: StageState) -> StageState:
        if self.outer is not None:
            state = self.outer.added_to(state, self._statistics.kept())
        for residuals in self._residuals.values():
            state = residuals.added_to(state)
        return state if self._average is None else self._average.added_to(state)

    def restore(self, state: StageState) -> None:
        """Go back to `state`. Raises CorruptMessage if it is not this stage's."""
        self._optimizer.restore(on_device(state, self.device), self.norm)
        if self.outer is not None and (added := self.outer.restore(state)):
            self._statistics.restore(added)
        if self._average is not None:
            self._average.restore(state)
        for number, residuals in self._residuals.items():
            residuals.restore(state)
            if self.outer is not None and self.outer.steps[number].is_held:
                residuals.hold()

    def _extras(self) -> list[Tensor]:
        """Return the tensors that replicas sum besides gradients: running statistics, and, last, the loss's weight."""
        added = self._statistics.contributions()
        wide = any(parameter.dtype is torch.float64 for parameter in self._summed_here)
        weight = torch.tensor([self.passes.weight], dtype=torch.float64 if wide else torch.float32)
        return [*added, weight] if self._weighs else added

    def _unpack(self) -> list[Tensor]:
        """Give the parameters what the replicas have summed; the summed contributions to the running statistics."""
        if self._flat is None:
            return self._statistics.contributions()
        summed = list(self._flat.unpack_parameters() if self.is_sharded else self._flat.unpack_gradients())
        return summed[:-1] if self._weighs else summed
