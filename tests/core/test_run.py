"""Payloads of workers, old and new."""

import json
from dataclasses import replace

from funcpipe.core import FaultTolerance, OnOutOfMemory, RunAccount, RunLimits, WorkerSpec, from_text, to_text
from tests.e2e import small

OLD_LIFE = {
    "checkpoint_steps": 4,
    "failure_interval_s": 86400.0,
    "retained_bytes": 1 << 20,
    "lifetime_s": 900.0,
    "cold_start_s": 2.5,
    "start_s": 30.0,
    "heartbeat_s": 5.0,
    "lease_s": 7.0,
    "max_usd": 3.0,
    "deadline_s": None,
    "spent_usd": 0.25,
    "elapsed_s": 60.0,
    "run_usd_s": 0.01,
    "usd_s": 0.002,
}
"""What stood in a payload's `life` before it was divided."""


def spec() -> WorkerSpec:
    return WorkerSpec(
        run="run-1",
        attempt=0,
        stage=1,
        replica=0,
        plan=small.plan(),
        storage="memory://",
        platform="local:///unused",
        bundle="b",
        bundle_sha256="0",
        parameters="p",
        epochs=1,
        seed=0,
        message_deadline_s=60.0,
        faults=FaultTolerance(
            checkpoint_steps=4,
            retained_bytes=1 << 20,
            lifetime_s=900.0,
            cold_start_s=2.5,
            start_s=30.0,
            heartbeat_s=5.0,
            lease_s=7.0,
        ),
        limits=RunLimits(max_usd=3.0),
        account=RunAccount(spent_usd=0.25, elapsed_s=60.0, run_usd_s=0.01, usd_s=0.002),
    )


def test_a_payload_reads_back_as_it_was_written() -> None:
    grows = FaultTolerance(on_oom=OnOutOfMemory.GROW, keep=True)
    for written in (spec(), replace(spec(), faults=grows)):
        assert from_text(WorkerSpec, to_text(written), source="payload") == written


def test_a_payload_from_before_life_was_divided_is_still_read() -> None:
    document = json.loads(to_text(spec()))
    assert document["format"] == "funcpipe.worker/1"
    old = {name: value for name, value in document.items() if name not in ("faults", "limits", "account")}
    text = json.dumps(old | {"life": OLD_LIFE})
    assert from_text(WorkerSpec, text, source="payload") == spec()
