"""The material of a page without a run: a plan, its prediction, and steps that took a little longer."""

from dataclasses import replace

from funcpipe.analysis.predict import predict
from funcpipe.core import (
    Bill,
    Event,
    FinishedRun,
    LayerProfile,
    ModelProfile,
    Outcome,
    Plan,
    ScheduleKind,
    Source,
    Stage,
    Sync,
    TensorProfile,
    Trace,
    Use,
    Wire,
    WorkerReport,
)
from funcpipe.partitioner.cost.evaluate import evaluate
from funcpipe.platforms.catalog import load_spec
from funcpipe.show.material import Material
from tests.run_documents import REPORT

SPEC = load_spec("aws-lambda")
SIZE = SPEC.sizes[2]
_SHARES = {Use.COMPUTE: 0.5, Use.TRANSFER: 0.125, Use.WAIT: 0.125, Use.SAVE: 0.125, Use.START: 0.125}


def material(*, stages: int = 2, replicas: int = 2, micro_batches: int = 2, steps: int = 3) -> Material:
    """All pieces; the second function was started again in the second step."""
    profile, plan = _profile(2 * stages), _plan(stages, replicas, micro_batches)
    plan = replace(plan, estimate=evaluate(plan, profile, SPEC))
    predicted = predict(plan, profile, SPEC)
    return Material(
        plan=plan,
        profile=profile,
        spec=SPEC,
        predicted=predicted,
        observed=_observed(predicted, steps, plan.global_batch),
        finished=_finished(plan, steps, predicted.duration_s),
    )


def _profile(layers: int) -> ModelProfile:
    return ModelProfile(
        model="chain",
        micro_batch=4,
        platform="aws-lambda",
        sizes=tuple(size.name for size in SPEC.sizes),
        base_memory_bytes=200 << 20,
        layers=tuple(
            LayerProfile(
                name=f"block.{i}",
                parameter_bytes=(8 + 3 * (i % 5)) << 20,
                activation_bytes=(6 + i % 4) << 20,
                forward_s=tuple((0.2 + 0.05 * (i % 3)) / size.vcpu for size in SPEC.sizes),
                backward_s=tuple((0.4 + 0.1 * (i % 3)) / size.vcpu for size in SPEC.sizes),
            )
            for i in range(layers)
        ),
        tensors=tuple(
            TensorProfile(
                name=f"block.{i}",
                producer=i,
                consumers=(i + 1, i + 3) if i % 4 == 0 and i + 3 < layers else (i + 1,),
                forward_bytes=2 << 20,
                backward_bytes=2 << 20,
            )
            for i in range(layers - 1)
        ),
    )


def _plan(stages: int, replicas: int, micro_batches: int) -> Plan:
    return Plan(
        global_batch=4 * replicas * micro_batches,
        micro_batch=4,
        replicas=replicas,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.THREE_PHASE,
        wire=Wire.FP32,
        model="chain",
        platform="aws-lambda",
        stages=tuple(
            Stage(first=2 * i, stop=2 * i + 2, size=SIZE.name, memory_mb=SIZE.memory_mb) for i in range(stages)
        ),
    )


def _observed(predicted: Trace, steps: int, samples: int) -> Trace:
    """The prediction over and over, a tenth slower, each step a little after the one before."""
    period_s = 1.15 * predicted.end_s
    return replace(
        predicted,
        run="demo",
        source=Source.EXECUTED,
        events=tuple(_later(event, step, period_s) for step in range(steps) for event in predicted.events),
        samples=dict.fromkeys(range(steps), samples),
    )


def _later(event: Event, step: int, period_s: float) -> Event:
    begun = step > 0 and (event.stage, event.replica) == (0, 1)
    start_s, end_s = 1.1 * event.start_s, 1.1 * event.end_s
    waited_s = 0.3 * (end_s - start_s) if event.task.startswith("get") else 0.0
    return replace(
        event,
        step=step,
        start_s=start_s + step * period_s,
        end_s=end_s + step * period_s,
        waited_s=waited_s,
        attempt=int(begun),
    )


def _finished(plan: Plan, steps: int, iteration_s: float) -> FinishedRun:
    alive_s = 1.2 * steps * iteration_s
    workers = tuple(
        _report(f"s{s}.r{r}", 0, Outcome.FINISHED, alive_s)
        for s in range(len(plan.stages))
        for r in range(plan.replicas)
    )
    again = _report("s0.r1", 1, Outcome.FINISHED, 0.8 * alive_s)  # its first attempt has left no report
    workers = (*(report for report in workers if report.worker != "s0.r1"), again)
    return FinishedRun(
        losses=tuple(2.3 * 0.97**step for step in range(steps)),
        bill=Bill(
            platform="aws-lambda",
            functions=len(workers) + 1,
            function_seconds=alive_s * len(workers),
            puts=100 * steps,
            gets=120 * steps,
            compute_usd=alive_s * len(workers) * SIZE.price_usd_s,
            request_usd=0.0005 * steps,
        ),
        workers=workers,
        elapsed_s=alive_s,
        kept_bytes=1 << 20,
    )


def _report(worker: str, attempt: int, outcome: Outcome, alive_s: float) -> WorkerReport:
    return replace(
        REPORT,
        worker=worker,
        attempt=attempt,
        outcome=outcome,
        ended_at_s=alive_s,
        puts=10,
        gets=12,
        peak_memory_bytes=500 << 20,
        alive_s=alive_s,
        usd_s=SIZE.price_usd_s,
        uses={use.value: alive_s * share for use, share in _SHARES.items()},
        first_step=attempt,
    )
