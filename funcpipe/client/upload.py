"""What functions find in the storage when they start: the code and the tensors of their stages."""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import replace

from funcpipe.client.prepare import PreparedRun
from funcpipe.comm import codec
from funcpipe.core import RunAccount, WorkerSpec, logs, prices_of
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.keyring import KeyFolder
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.signed_storage import key_of

_log = logging.getLogger(__name__)


def upload(prepared: PreparedRun, keys: Keys) -> Iterator[WorkerSpec]:
    """Put each stage's code and tensors, and what it had learned; yields each worker's payload, stage by stage."""
    job, storage, log_level = prepared.job, prepared.storage, logs.wanted_in_functions()
    run_key = key_of(KeyFolder(), keys).text
    for number, stage in enumerate(prepared.stages):
        storage.put(keys.bundle(number), stage.bundle)
        storage.put(keys.parameters(number), codec.encode(stage.tensors))
        _log.info("run %s: stage %d is uploaded, %d bytes of code", keys.run, number, len(stage.bundle))
        state = prepared.state_of(number)
        first_step = 0 if prepared.resumed is None else prepared.resumed.step
        if state is not None:
            Checkpoints(storage, keys).save(number, first_step, state, writer="resumed")
        for replica in range(job.plan.replicas):
            yield WorkerSpec(
                run=keys.run,
                generation=keys.generation,
                nonce=keys.nonce,
                attempt=0,
                stage=number,
                replica=replica,
                plan=replace(job.plan, estimate=None, solver=None),
                storage=prepared.storage_url,
                platform=prepared.platform.url,
                bundle=keys.bundle(number),
                bundle_sha256=hashlib.sha256(stage.bundle).hexdigest(),
                parameters=keys.parameters(number),
                epochs=job.epochs,
                seed=job.seed,
                message_deadline_s=job.message_deadline_s,
                first_step=first_step,
                faults=prepared.faults,
                limits=prepared.limits,
                account=_account(prepared, number),
                log_level=log_level,
                run_key=run_key,
            )


def _account(prepared: PreparedRun, stage: int) -> RunAccount:
    """What the run has cost and taken so far, and what it, a function of `stage` and requests cost."""
    prices = prepared.job.prices
    usd_s = prices_of(prepared.job.plan, prices).function_usd_s
    return replace(
        prepared.account,
        run_usd_s=sum(usd_s) * prepared.job.plan.replicas,
        usd_s=usd_s[stage],
        put_usd=prices.price_put_usd,
        get_usd=prices.price_get_usd,
        empty_get_usd=prices.empty_get_usd,
    )
