"""How long an iteration takes: the one statement of it, as a recurrence from the last stage to the first.

A stage is put in front of those behind it, again and again. All that it needs to know about them are the few numbers of
a `PlanTail`; after the first stage these give the seconds and dollars of the whole plan. `evaluate` prices a plan this
way, the exhaustive search many plans at once, and the exact search its labels, which *are* such tails. The programmes
for solvers build their rows from `synchronised_s`, `ended_s` and `round_trip_s`, which work on expressions as well.

GPipe: the forward pass fills the pipeline once and then follows its slowest lane; so does the backward pass, whose
stages synchronise as soon as their own last backward is done (FuncPipe, section 3.2). With `repeats` = micro-batches of
a replica − 1, and over the stages k of a plan:

    forward       = sum of all forward lanes + repeats · slowest forward lane
    finish of k   = sum of the backward lanes from k on + repeats · the slowest of these + synchronisation of k
    iteration     = forward + the latest finish

By hand, for two stages and two micro-batches, without transfers: forward 1 and 2 s, backward 2 and 4 s. Forward takes
1 + 2 + 1 · 2 = 5 s. The last stage finishes 4 + 1 · 4 = 8 s after that, the first 6 + 1 · 4 = 10 s after: 15 s.

>>> def computing(forward_s, backward_s):  # a stage without transfers, requests or price
...     lanes = forward_s, forward_s, backward_s, backward_s, forward_s + backward_s
...     return StageCosts(*lanes, sync_s=0, price_usd_s=0, request_usd=0, work_s=0, share=0)
>>> last = with_stage(PlanTail.empty(1), computing(2.0, 4.0), repeats=1)
>>> float(last.finish_s[0])
8.0
>>> both = with_stage(last, computing(1.0, 2.0), repeats=1)
>>> float(both.finish_s[0]), float(both.iteration_s(repeats=1, seconds_per_work=0.0)[0])
(10.0, 15.0)

1F1B and eager 1F1B run forwards and backwards in turn: one micro-batch goes there and back, the others follow at the
pace of the slowest stage. Its lanes serve both passes, so `Lanes.slowest` counts both in the forward lane and none in
the backward lane (PipeDream-Flush, Narayanan et al., ICML 2021: (m + stages − 1)(F + B) without transfers). And a stage
that may hold h micro-batches, fewer than there are, begins no more than h in the time that one takes from its forward
at the stage to its backward there, which all transfers behind it prolong (Little's law): its pace is at least
`share` = 1/h of that round trip. The pace is taken to be even: with unequal stages, iterations are a little shorter
than this says, or longer where a slow link lies between fast ones.

Replicas that train alone synchronise in one of H steps. The seconds are then the mean of H steps, of which H − 1 end
with the last backward of the first stage, and one as above:

    iteration     = forward + (1 − 1/H) · the backward pass + 1/H · the latest finish

That is the same recurrence in other costs of stages: 1 − 1/H of the backward lanes, which every such step passes one
after the other, count with the forward lanes, and 1/H of them, and of synchronisation, as backward. Only the slowest
backward lane of a whole plan is a number of its own (`local_repeats`). By hand, for the two stages above, H = 4, and
synchronisation in 0 and 8 s: the finishes are 10 and 8 + 8 = 16 s after the forward, so three of four steps take 15 s,
one takes 21 s, and a step takes 16.5 s in the mean. The last stage counts 2 + 3/4 · 4 = 5 s forward, 1 s backward and
2 s of synchronisation, the first one 1 + 3/4 · 2 = 2.5 s and 0.5 s; of the repeats, 1/4 are of meetings.

>>> def at_times(forward_s, backward_s, sync_s):  # the same two stages as means of four steps
...     costs = computing(forward_s, backward_s)._replace(sync_s=sync_s / 4, backward_sum_s=backward_s / 4)
...     return costs._replace(forward_sum_s=forward_s + 3 / 4 * backward_s)
>>> last = with_stage(PlanTail.empty(1), at_times(2.0, 4.0, 8.0), repeats=1 / 4)
>>> both = with_stage(last, at_times(1.0, 2.0, 0.0), repeats=1 / 4)
>>> float(both.iteration_s(repeats=1, local_repeats=3 / 4, seconds_per_work=0.0)[0])
16.5
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from funcpipe.partitioner.cost import Array
from funcpipe.partitioner.cost.loads import Setting


class StageCosts(NamedTuple):
    """Everything about stages that the time and the money of an iteration depend on; an element for each stage.

    An iteration is the mean of all, where replicas train alone. Seconds are of one micro-batch, except `sync_s` (of an
    iteration) and `work_s` (processor seconds of an iteration, all replicas). `price_usd_s` is what all replicas cost
    in a second, `request_usd` what their requests cost in an iteration. `share` is that of `Setting.round_shares`.
    """

    forward_sum_s: Array
    forward_lane_s: Array
    backward_sum_s: Array
    backward_lane_s: Array
    round_s: Array
    sync_s: Array
    price_usd_s: Array
    request_usd: Array
    work_s: Array
    share: Array


class PlanTail(NamedTuple):
    """The stages of plans from some stage to the last; an element for each plan.

    `finish_s` is when the last of them has synchronised, counted from the first backward of the last stage.
    """

    forward_s: Array
    forward_lane_s: Array
    backward_s: Array
    backward_lane_s: Array
    finish_s: Array
    price_usd_s: Array
    request_usd: Array
    work_s: Array

    @classmethod
    def empty(cls, plans: int) -> "PlanTail":
        """No stages yet."""
        return cls(*np.zeros((len(cls._fields), plans)))

    def iteration_s(
        self, *, repeats: int, seconds_per_work: float, loading_s: float = 0.0, local_repeats: float = 0.0
    ) -> Array:
        """Seconds of an iteration, once the first stage is in.

        No shorter than the processors need for all the work, and functions to load their data, which takes `loading_s`.
        """
        ended: Array = ended_s(self.forward_s, self.forward_lane_s, self.finish_s, repeats)
        ended = ended + local_repeats * self.backward_lane_s
        return np.maximum(np.maximum(ended, seconds_per_work * self.work_s), loading_s)


def with_stage(tail: PlanTail, stage: StageCosts, *, repeats: float) -> PlanTail:
    """Put `stage` in front of `tail`; `repeats` are those before a synchronisation (`Setting.meeting_repeats`)."""
    backward_s = tail.backward_s + stage.backward_sum_s
    backward_lane_s = np.maximum(tail.backward_lane_s, stage.backward_lane_s)
    pace_s = stage.share * round_trip_s(tail.forward_s, tail.backward_s, stage.round_s)
    return PlanTail(
        forward_s=tail.forward_s + stage.forward_sum_s,
        forward_lane_s=np.maximum(tail.forward_lane_s, np.maximum(pace_s, stage.forward_lane_s)),
        backward_s=backward_s,
        backward_lane_s=backward_lane_s,
        finish_s=np.maximum(tail.finish_s, synchronised_s(backward_s, backward_lane_s, stage.sync_s, repeats)),
        price_usd_s=tail.price_usd_s + stage.price_usd_s,
        request_usd=tail.request_usd + stage.request_usd,
        work_s=tail.work_s + stage.work_s,
    )


def synchronised_s(backward_s: Any, slowest_s: Any, sync_s: Any, repeats: float) -> Any:
    """When a stage has synchronised: its first backward comes through, the others follow, then it sums gradients."""
    return backward_s + repeats * slowest_s + sync_s


def ended_s(forward_s: Any, slowest_s: Any, finish_s: Any, repeats: int) -> Any:
    """When an iteration has ended: the first forward comes through, the others follow, then come the backwards."""
    return forward_s + repeats * slowest_s + finish_s


def round_trip_s(forward_behind_s: Any, backward_behind_s: Any, own_round_s: Any) -> Any:
    """From the start of a micro-batch's forward at a stage to the end of its backward there."""
    return forward_behind_s + backward_behind_s + own_round_s


def dollars(price_usd_s: Any, iteration_s: Any, request_usd: Any) -> Any:
    """The dollars of an iteration: functions by the second, storage by the request."""
    return price_usd_s * iteration_s + request_usd


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCosts:
    """Seconds of an iteration, dollars for each of them and for requests; an element for each plan."""

    iteration_s: Array
    price_usd_s: Array
    request_usd: Array

    @property
    def cost_usd(self) -> Array:
        """Dollars of an iteration."""
        found: Array = dollars(self.price_usd_s, self.iteration_s, self.request_usd)
        return found


def plan_costs(stages: StageCosts, setting: Setting) -> PlanCosts:
    """The costs of plans; the last axis of `stages` runs along the stages of a plan, from the first to the last."""
    shape = np.broadcast_shapes(*(column.shape for column in stages))
    columns = [np.broadcast_to(column, shape) for column in stages]
    tail = PlanTail.empty(1)
    for stage in reversed(range(shape[-1])):
        tail = with_stage(
            tail, StageCosts(*(column[..., stage] for column in columns)), repeats=setting.meeting_repeats
        )
    return PlanCosts(
        iteration_s=tail.iteration_s(
            repeats=setting.repeats,
            seconds_per_work=setting.seconds_per_work,
            loading_s=setting.loading_s,
            local_repeats=setting.local_repeats,
        ),
        price_usd_s=tail.price_usd_s,
        request_usd=tail.request_usd,
    )
