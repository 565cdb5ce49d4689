"""The parts that all ways share: the training that a job needs, the chance to miss its deadline, the record of a way.

A job needs samples in synchronous ways, and normalised iterations in asynchronous ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from funcpipe.core.loss_model import InverseLoss, LossModel, WeightedLoss, check_above_floor
from funcpipe.core.market import MONTH_S, Machine
from funcpipe.core.plan import Plan
from funcpipe.core.provision import CostItem, CurvePoint, JobSpec, Provision, Rented
from funcpipe.errors import Infeasible

MODEL_SPREAD = 0.05
"""The standard deviation of a predicted time, as a share of it, that no loss model explains: an assumption.

λDNN's predictions were off by 0.2 to 10.3 %, spotDNN's by 0.2 to 6.9 %.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The cluster that an asynchronous loss depends on: weighted batch, workers, convergence coefficient."""

    batch: float
    workers: int
    convergence: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A job with the model of its loss, which a target loss needs; `deadline_s` is what a search aims at.

    `left` is the share of the training that is still to be done.
    """

    job: JobSpec
    loss: LossModel | None = None
    deadline_s: float = math.inf
    left: float = 1.0

    def synchronous_samples(self) -> float:
        """The samples to train on if every update sums the gradients of one global batch.

        Losses fitted on another batch are taken to need the same number of samples.
        """
        job = self.job
        if job.epochs is not None:
            return self.left * job.epochs * job.samples
        loss = self._loss()
        if isinstance(loss, InverseLoss):
            return self.left * loss.steps(self._target()) * loss.batch
        return self.asynchronous_steps(Cluster(batch=job.global_batch, workers=1, convergence=0.0)) * job.global_batch

    def asynchronous_steps(self, cluster: Cluster) -> float:
        """Normalised iterations, each of `cluster.batch` samples; raises Infeasible if the loss is out of reach."""
        job = self.job
        if job.epochs is not None:
            return self.left * job.epochs * job.samples / cluster.batch
        loss = self._loss()
        if isinstance(loss, InverseLoss):
            steps = loss.steps(self._target(), workers=cluster.workers, asynchronous=True)
            return self.left * steps * loss.batch / cluster.batch
        return self.left * loss.steps(
            self._target(), batch=cluster.batch, workers=cluster.workers, convergence=cluster.convergence
        )

    def check(self) -> None:
        """Raise Infeasible if no loss model says how long the job takes, or its loss is out of reach of any cluster."""
        if self.job.target_loss is not None:
            loss = self._loss()
            check_above_floor(self.job.target_loss, loss.floor if isinstance(loss, InverseLoss) else loss.gamma5)

    def spread(self, cluster: Cluster | None = None) -> float:
        """The standard deviation of the time as a share of it: of the loss model, and of the prediction."""
        loss = self.loss
        if self.job.target_loss is None or loss is None:
            return MODEL_SPREAD
        if isinstance(loss, InverseLoss):
            own = loss.spread(self.job.target_loss)
        else:
            at = cluster or Cluster(batch=self.job.global_batch, workers=1, convergence=0.0)
            own = loss.spread(self.job.target_loss, batch=at.batch, workers=at.workers, convergence=at.convergence)
        return math.hypot(own, MODEL_SPREAD)

    def loss_at(self, done: float, cluster: Cluster | None = None) -> float | None:
        """The modelled loss when the share `done` of the training is done; None where none is modelled, or yet."""
        if self.loss is None or done <= 0:
            return None
        if isinstance(self.loss, WeightedLoss):
            at = cluster or Cluster(batch=self.job.global_batch, workers=1, convergence=0.0)
            steps = self._progress(done) * self.asynchronous_steps(at)
            return self.loss.loss(steps, batch=at.batch, workers=at.workers, convergence=at.convergence)
        if cluster is None:
            return self.loss.loss(self._progress(done) * self.synchronous_samples() / self.loss.batch)
        steps = self._progress(done) * self.asynchronous_steps(cluster) * cluster.batch / self.loss.batch
        return self.loss.loss(steps, workers=cluster.workers, asynchronous=True)

    def _progress(self, done: float) -> float:
        """The progress when the share `done` of the remaining training is done, in units of that remainder."""
        return (1 - self.left + self.left * done) / self.left

    def _target(self) -> float:
        assert self.job.target_loss is not None, "a job without epochs has a target loss"
        return self.job.target_loss

    def _loss(self) -> LossModel:
        if self.loss is None:
            raise Infeasible(
                f"the job is to reach {self.job.goal}, and no loss model says how long that takes; "
                "fit one to a short run (funcpipe provision fit-loss), or ask for epochs"
            )
        return self.loss


def no_way(way: str, goal: Goal, fastest_s: float | None, what: str) -> Infeasible:
    """The error of a search that has found nothing: the deadline, the fastest configuration if there is any."""
    if fastest_s is None:
        return Infeasible(f"{way}: {what}")
    return Infeasible(
        f"{way}: the deadline of {goal.deadline_s:.0f} s cannot be met, the fastest of {what} takes {fastest_s:.0f} s; "
        "allow more time or a larger quota"
    )


_MOST_LOSSES = 40
"""The largest number of lost machines that is considered; more count as a miss."""


def loss_rate_s(machine: Machine) -> float:
    """The rate of losing one spot machine of this type, per second: a Poisson process by its monthly chance."""
    monthly = min(machine.interruption or 0.0, 0.999)
    return -math.log1p(-monthly) / MONTH_S


def miss_chance(
    seconds: float, deadline_s: float | None, *, spread: float, losses_s: float = 0.0, delay_s: float = 0.0
) -> float | None:
    """The chance that a job of `seconds` takes longer than `deadline_s`; None without one.

    The time without losses is normal with a standard deviation of `spread` times itself. `losses_s` machines a second
    are lost, each of which adds `delay_s`.
    """
    if deadline_s is None or math.isinf(deadline_s):
        return None
    expected, chance, probability = losses_s * seconds, 0.0, math.exp(-losses_s * seconds)
    for number in range(_MOST_LOSSES):
        chance += probability * _late(seconds, deadline_s - number * delay_s, spread)
        probability *= expected / (number + 1)
        if probability < 1e-12:
            break
    return min(chance, 1.0)


def aimed_deadline_s(deadline_s: float | None, allowed: float, spread: float) -> float:
    """The time to plan for, so that `deadline_s` is missed with the chance `allowed`; infinity without a deadline."""
    if deadline_s is None:
        return math.inf
    if allowed <= 0 or spread <= 0:
        return deadline_s
    return deadline_s / (1 + max(NormalDist().inv_cdf(1 - allowed), 0.0) * spread)


def _late(seconds: float, deadline_s: float, spread: float) -> float:
    if spread <= 0 or seconds <= 0:
        return float(seconds > deadline_s)
    return 1 - NormalDist(seconds, spread * seconds).cdf(deadline_s)


_POINTS = 25


def provision(
    way: str,
    goal: Goal,
    *,
    rented: Sequence[Rented],
    seconds: float,
    start_s: float,
    iterations: float,
    cost: Sequence[CostItem],
    binds: str,
    why: str,
    cluster: Cluster | None = None,
    losses_s: float = 0.0,
    delay_s: float = 0.0,
    assumptions: Sequence[str] = (),
    plan: Plan | None = None,
) -> Provision:
    """The record of a configuration that takes `seconds`, of which the first `start_s` pass before any iteration."""
    spread = goal.spread(cluster)
    usd = sum(item.usd for item in cost)
    return Provision(
        way=way,
        rented=tuple(rented),
        seconds=seconds,
        iterations=iterations,
        cost=tuple(cost),
        binds=binds,
        why=why,
        start_s=start_s,
        spread=spread,
        losses_s=losses_s,
        delay_s=delay_s,
        miss_chance=miss_chance(seconds, goal.job.deadline_s, spread=spread, losses_s=losses_s, delay_s=delay_s),
        curve=curve(goal, seconds=seconds, start_s=start_s, usd=usd, cluster=cluster),
        assumptions=tuple(assumptions),
        plan=plan,
    )


def curve(goal: Goal, *, seconds: float, start_s: float, usd: float, cluster: Cluster | None) -> tuple[CurvePoint, ...]:
    """Work, dollars and loss over time; the work goes on evenly after the start, the dollars from the beginning."""
    points = []
    for i in range(_POINTS + 1):
        done = i / _POINTS
        time_s = start_s + done * (seconds - start_s)
        spent_usd = usd * time_s / seconds if seconds else usd
        points.append(CurvePoint(time_s=time_s, done=done, usd=spent_usd, loss=goal.loss_at(done, cluster)))
    return tuple(points)


def what_binds(seconds: float, deadline_s: float) -> str:
    """Return what binds: the deadline, if it leaves a slower, cheaper configuration no room."""
    return "deadline" if not math.isinf(deadline_s) and seconds > 0.9 * deadline_s else "price"
