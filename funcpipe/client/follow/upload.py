"""The objects that functions need when they start: the data, and the code and the tensors of their stages."""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import replace

from funcpipe.client.prepare.prepared_run import PreparedRun
from funcpipe.comm import codec
from funcpipe.core import RunAccount, WorkerSpec, logs, prices_of
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.reports import ValidationKeys
from funcpipe.runstate.signing import KeyFolder, key_of
from funcpipe.runstate.validations import BestModel

_log = logging.getLogger(__name__)


def upload(prepared: PreparedRun, keys: Keys) -> Iterator[WorkerSpec]:
    """Put the data, and each stage's code, tensors and what it had learned; yields workers' payloads by stage."""
    job, storage, log_level = prepared.job, prepared.storage, logs.wanted_in_functions()
    run_key = key_of(KeyFolder(), keys).text
    for name, contents in prepared.data.objects():
        storage.put(keys.data(name), contents)
    for number, stage in enumerate(prepared.stages):
        storage.put(keys.bundle(number), stage.bundle)
        storage.put(keys.parameters(number), codec.encode(stage.tensors))
        _log.info("run %s: stage %d is uploaded, %d bytes of code", keys.run, number, len(stage.bundle))
        state = prepared.state_of(number)
        first_step = prepared.first_step
        if state is not None:
            Checkpoints(storage, keys).save(number, first_step, state, writer="resumed")
        best = prepared.best_of(number)
        if best is not None:
            BestModel(storage, ValidationKeys.of(keys)).save(number, best[0], best[1], writer="resumed")
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
                began_step=prepared.began_step,
                faults=prepared.faults,
                limits=prepared.limits,
                account=_account(prepared, number),
                log_level=log_level,
                run_key=run_key,
                validated=prepared.validations[-1] if prepared.validations else None,
            )


def _account(prepared: PreparedRun, stage: int) -> RunAccount:
    """The cost and the time of the run so far, and the prices of a function of `stage` and of requests.

    This client's own requests are in it, and the invocations of all functions.
    """
    prices, plan = prepared.job.prices, prepared.job.plan
    usd_s = prices_of(plan, prices).function_usd_s
    asked_usd = prices.client_usd(prepared.meter.by_kind, plan.stores)
    starting_usd = asked_usd + plan.workers * prices.price_invocation_usd
    return replace(
        prepared.account,
        requests_usd=prepared.account.requests_usd + starting_usd,
        invocation_usd=prices.price_invocation_usd,
        run_usd_s=sum(usd_s) * plan.replicas,
        usd_s=usd_s[stage],
        put_usd=prices.price_put_usd,
        get_usd=prices.price_get_usd,
        empty_get_usd=prices.empty_get_usd,
        hours_usd_s=prices.stores_usd_h(plan.stores) / 3600,
        collect_usd=prices.traffic_usd(prepared.collected_bytes),
        stores=prices.other_stores(plan.stores),
    )
