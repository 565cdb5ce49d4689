"""The entry of a probe function."""

import hashlib
import time
import traceback

import torch

from funcpipe.comm import codec
from funcpipe.core import MB, LayerReport, ProbeSpec, from_text, to_text
from funcpipe.core.logs import in_function
from funcpipe.core.texts import encodable, shortened
from funcpipe.errors import CorruptMessage
from funcpipe.model.split import load_stage
from funcpipe.platforms import process as allocator
from funcpipe.platforms.base import Invoked, OpenPlatform, OpenStorage, Storage
from funcpipe.profiler.measure import measure_here
from funcpipe.profiler.remote import keys
from funcpipe.profiler.remote.machine import measure_machine


def main(payload: str, *, open_storage: OpenStorage, open_platform: OpenPlatform, invoked: Invoked) -> None:
    """Measure what `payload`, the JSON of a ProbeSpec, asks for. Ends with exit code 1 after a failure."""
    started_at_s = time.time()
    spec = from_text(ProbeSpec, payload, source="the invocation payload")
    allocator.configure()
    torch.set_num_threads(1)
    with in_function(run=spec.run, worker=spec.worker, attempt=0):
        _measure(spec, open_storage(spec.storage), started_at_s)


def _measure(spec: ProbeSpec, storage: Storage, started_at_s: float) -> None:
    try:
        if spec.layers:
            _measure_layers(spec, storage, until_s=started_at_s + spec.time_s)
        else:
            _measure_platform(spec, storage, started_at_s)
    except Exception as error:  # noqa: BLE001 - any failure is reported to the client
        text = shortened(encodable("".join(traceback.format_exception(error))))
        storage.put(keys.failure(spec.run, spec.number), text.encode())
        raise SystemExit(1) from None


def _measure_platform(spec: ProbeSpec, storage: Storage, started_at_s: float) -> None:
    report = measure_machine(
        storage,
        keys.scratch(spec.run, spec.number),
        started_at_s=started_at_s,
        memory_bytes=spec.memory_mb * MB,
    )
    storage.put(keys.machine(spec.run, spec.number), to_text(report).encode())


def _measure_layers(spec: ProbeSpec, storage: Storage, *, until_s: float) -> None:
    """Time the layers one by one, and report each at once, so that a layer too large for this function loses no
    results.
    """
    for number in spec.layers:
        if time.time() > until_s:
            return
        report = _measure_layer(spec, storage, number)
        storage.put(keys.layer(spec.run, spec.size, number), to_text(report).encode())


def _measure_layer(spec: ProbeSpec, storage: Storage, number: int) -> LayerReport:
    bundle = storage.get(keys.bundle(spec.run, number))
    if hashlib.sha256(bundle).hexdigest() != spec.code[str(number)]:
        raise CorruptMessage(
            f"the code of layer {number} is not the one that the invocation names: its SHA-256 differs"
        )
    stage, (values, loss) = load_stage(bundle, codec.decode(storage.get(keys.tensors(spec.run, number))))
    times = measure_here(stage, values, loss, spec.repeats)
    return LayerReport(forward_s=times.forward_s, backward_s=times.backward_s, workspace_bytes=times.workspace_bytes)
