"""Predicted and observed seconds of a step of λDNN's way: local functions with imposed links, around a server here.

The model has 1 MB of parameters, and its computation is tiny; its seconds are imposed by sleeping. Functions have links
of their own, and all together no more than the server's. They exchange through a storage on this machine, `--storage`,
such as redis://127.0.0.1:6379/0; by default a folder. Below each number of functions stand the parts of a step.
"""

import argparse
import hashlib
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from torch import Tensor, nn

from experiments.studies.server_cases import LINK_MB_S, MICRO_BATCH, RUN, SERVER_MB_S, SLOW_S, job, model_mb
from experiments.studies.server_times import TimedStep, bsp_predicted_s, print_parts, print_row, timed_steps
from funcpipe.client.server_job import stored_job
from funcpipe.client.site import open_local
from funcpipe.core import PlatformSpec, ServerFunctionSpec
from funcpipe.core.run_key import RunKey
from funcpipe.parameter_server.function_crew import FunctionCrew, FunctionSite
from funcpipe.parameter_server.function_messages import ServerKeys
from funcpipe.parameter_server.values import ServerWorker
from funcpipe.platforms.catalog import load_spec, open_storage
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.signed_storage import OneKey, SignedStorage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--functions", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--storage", help="URL (default: a folder of this machine)")
    parser.add_argument("--latency", type=float, default=0.001, help="seconds of a function's request (default: 0.001)")
    options = parser.parse_args()
    print(
        f"model {model_mb():.2f} MB, links {LINK_MB_S:g} MB/s, server {SERVER_MB_S:g} MB/s, {MICRO_BATCH} samples each"
    )
    print(f"{'':22} {'predicted s':>12} {'observed':>9} {'error':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for count in options.functions:
            steps = observed(count, options.steps, options.storage or Path(folder).as_uri(), options.latency)
            print_row(f"{count} functions", bsp_predicted_s(count), fmean(step.seconds for step in steps))
            print_parts(count, steps)


def sleeping_loss(output: Tensor, target: Tensor) -> Tensor:
    """The loss, after as long as the machine that is stood for would take for these samples."""
    time.sleep(SLOW_S * len(output))
    return nn.functional.mse_loss(output, target)


def platform_spec(latency_s: float) -> PlatformSpec:
    """aws-lambda's functions, with these links to a storage."""
    spec = load_spec("aws-lambda")
    link = LINK_MB_S * 1e6
    sizes = tuple(replace(size, upload_bytes_s=link, download_bytes_s=link) for size in spec.sizes)
    return replace(spec, sizes=sizes, latency_s=latency_s, cold_start_s=0.5, shared_bytes_s=SERVER_MB_S * 1e6)


def observed(functions: int, steps: int, url: str, latency_s: float) -> list[TimedStep]:
    """Each step but the first."""
    made = job(MICRO_BATCH * functions * (steps + 1), MICRO_BATCH * functions)
    made = replace(made, recipe=replace(made.recipe, loss=sleeping_loss))
    run_key = RunKey.new()
    keys = Keys(RUN, 0, run_key.fingerprint)
    storage = SignedStorage(open_storage(url), OneKey(run_key))
    sent = stored_job(made, storage, ServerKeys(keys).root)
    spec = ServerFunctionSpec(
        run=RUN,
        worker="f",
        attempt=0,
        size="1024MB",
        memory_mb=1024,
        storage=url,
        bundle_sha256=hashlib.sha256(sent.bundle).hexdigest(),
        seed=sent.seed,
        message_deadline_s=60.0,
        nonce=keys.nonce,
        run_key=run_key.text,
    )
    workers = [ServerWorker(name=f"f{number}") for number in range(functions)]
    try:
        with (
            open_local(platform_spec(latency_s)) as platform,
            FunctionCrew(FunctionSite(job=sent, spec=spec, platform=platform, storage=storage), workers) as crew,
        ):
            return timed_steps(crew, made)
    finally:
        storage.delete_many(storage.list(f"{RUN}/"))


if __name__ == "__main__":
    main()
