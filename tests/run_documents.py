"""What a run of two workers leaves in its storage, for tests that write it there themselves."""

from funcpipe.core import Heartbeat, Outcome, RunRecord, WorkerReport
from tests.e2e import small

PLAN = small.plan(stages=2, replicas=1)
RECORD = RunRecord(
    run="run-1",
    generation=0,
    plan=PLAN,
    platform="recording://here",
    storage="memory://",
    samples=64,
    epochs=1,
    steps=16,
    first_step=0,
    seed=0,
    shuffle=True,
    clip_grad_norm=None,
)
BEAT = Heartbeat(
    worker="s0.r0",
    attempt=0,
    beat=1,
    step=3,
    steps=16,
    alive_s=40.0,
    step_s=0.1,
    memory_bytes=900 << 20,
    memory_mb=1024,
    spent_usd=0.0,
    run_usd=0.5,
    run_s=60.0,
    sent_at_s=1000.0,
)
REPORT = WorkerReport(
    worker="s0.r0",
    attempt=0,
    outcome=Outcome.FINISHED,
    started_at_s=0.0,
    ended_at_s=1.0,
    puts=0,
    gets=0,
    empty_gets=0,
    sent_bytes=0,
    received_bytes=0,
    peak_memory_bytes=0,
)
