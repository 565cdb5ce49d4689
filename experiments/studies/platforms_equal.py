"""The demo's job on four platforms, and whether it ends with the same parameters, bit for bit.

(a) local functions; (b) local functions with the limits of AWS Lambda; (c) the AWS module: control plane of moto, AWS's
own runtime client in every function, a real S3 server where FUNCPIPE_TEST_S3 names one (`make s3-server`), else moto's;
(d) the Alibaba module: its SDKs against conforming servers of the tests, our container's HTTP server in every function.
"""

import argparse
import hashlib
import json
import os
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import boto3
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from experiments.models import digits
from experiments.studies.equality import even_plan
from funcpipe import FuncPipe
from funcpipe.client.callbacks import EachStep
from funcpipe.client.job import Job
from funcpipe.client.launch import launch
from funcpipe.client.prepare import prepare
from funcpipe.client.results import Progress, RunResult
from funcpipe.client.session import session_on
from funcpipe.client.site import Site
from funcpipe.core import Plan
from funcpipe.model.graph import trace
from funcpipe.platforms.aliyun.account import Account as AliyunAccount
from funcpipe.platforms.aliyun.deployment import Deployer as AliyunDeployer
from funcpipe.platforms.aliyun.functions import AliyunPlatform
from funcpipe.platforms.aliyun.template import container_package, shape_of
from funcpipe.platforms.aws.account import Account as AwsAccount
from funcpipe.platforms.aws.deployment import Deployer as AwsDeployer
from funcpipe.platforms.aws.functions import AwsPlatform
from funcpipe.platforms.aws.image import lambda_package
from funcpipe.platforms.aws.template import Shape
from funcpipe.platforms.base import Platform
from funcpipe.platforms.catalog import load_spec, open_storage
from funcpipe.platforms.shared.docker import Docker
from funcpipe.platforms.shared.polling import Polling
from funcpipe.training.recipe import Recipe
from tests.cloud_emulation.aliyun import aliyun_cloud
from tests.cloud_emulation.aws import aws_cloud
from tests.cloud_emulation.docker import RegistryDocker
from tests.contract.oss_server import ACCESS_KEY, REGION, SECRET_KEY, OssServer

STEPS, POLL_S = 4, 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ways = {"local": on_local, "local --like aws-lambda": on_likeness, "aws-lambda": on_aws, "aliyun-fc": on_aliyun}
    rows = []
    for name, run in ways.items():
        print(f"== {name}", flush=True)
        began_s = time.monotonic()
        result = run()
        seconds, digest = time.monotonic() - began_s, digest_of(result.tensors)
        row = {"platform": name, "losses": result.losses, "seconds": seconds, "sha256": digest, "run": result.run}
        rows.append(row)
        print(f"   {len(result.workers)} functions, losses {', '.join(f'{loss:.6f}' for loss in result.losses)}")
        print(f"   {seconds:.1f} s with start and end; parameters {digest[:16]}", flush=True)
    equal = len({row["sha256"] for row in rows}) == 1
    print(f"the same parameters, bit for bit: {'yes' if equal else 'NO'}")
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")
    raise SystemExit(0 if equal else 1)


def on_local() -> RunResult:
    return pipe().train(data, plan=plan("1024MB", 1024), callbacks=[EachStep(show)])


def on_likeness() -> RunResult:
    return pipe().train(data, plan=plan("1024MB", 1024), like="aws-lambda", callbacks=[EachStep(show)])


def on_aws() -> RunResult:
    real = os.environ.get("FUNCPIPE_TEST_S3")
    keys = {name: os.environ.get(name, "test") for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    with tempfile.TemporaryDirectory() as folder, aws_cloud(Path(folder)) as cloud, environment(keys):
        cloud.environment |= keys
        account = AwsAccount(region="us-east-1", endpoint=cloud.endpoint)
        deployer = AwsDeployer(account, say=said, sleep=lambda s: None, docker=Docker("no-docker"))
        found = deployer.deploy(Shape(name="funcpipe", memory_mb=(1024,)), lambda_package())
        said(found.keeping_text(load_spec("aws-lambda")))
        url = f"s3://{found.bucket}/runs?endpoint={real or cloud.moto}&region=us-east-1"
        said(f"storage {url}")
        if real:
            boto3.client("s3", endpoint_url=real, region_name="us-east-1").create_bucket(Bucket=found.bucket)
        platform = AwsPlatform(load_spec("aws-lambda"), account, polling=Polling(every_s=POLL_S))
        result = train(platform, plan("1024MB", 1024), url)
        said(f"calls of the control plane: {dict(Counter(map(kind, cloud.calls)))}")
        deployer.destroy("funcpipe")
    return result


def on_aliyun() -> RunResult:
    keys = {"OSS_ACCESS_KEY_ID": ACCESS_KEY, "OSS_ACCESS_KEY_SECRET": SECRET_KEY}
    with environment(keys), oss_server() as oss, aliyun_cloud() as cloud, tempfile.TemporaryDirectory() as folder:
        account = AliyunAccount(region=REGION, endpoint=cloud.endpoint)
        deployer = AliyunDeployer(account, say=said, docker=RegistryDocker(cloud, Path(folder)), oss=oss.endpoint)
        spec = load_spec("aliyun-fc")
        shape = shape_of(spec, name="funcpipe", sizes=("1vCPU-1024MB",), repository="registry.test/you/funcpipe")
        found = deployer.deploy(shape, container_package())
        url = f"oss://{found.bucket}/runs?endpoint={oss.endpoint}&region={REGION}"
        said(f"storage {url}")
        result = train(AliyunPlatform(spec, account, polling=Polling(every_s=POLL_S)), plan("1vCPU-1024MB", 1024), url)
        said(f"calls of the control plane: {dict(Counter(cloud.calls))}")
        deployer.destroy("funcpipe")
    return result


def kind(call: str) -> str:
    """A call without what it is about."""
    return re.sub(r"/(?!2015-03-31)[^/]*\d[^/]*", "/…", call)


def train(platform: Platform, chosen: Plan, url: str) -> RunResult:
    dataset = data()
    job = Job(
        graph=trace(model(), dataset[: chosen.micro_batch][:1]),
        plan=chosen,
        recipe=Recipe(loss=digits.loss, optimizer=digits.optimizer),
        dataset=data,
        samples=len(dataset),
        epochs=1,
        seed=0,
        shuffle=True,
        message_deadline_s=300.0,
        prices=platform.spec,
    )
    return launch(prepare(job, session_on(Site(platform, open_storage(url), url))), show)


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return digits.model()


def pipe() -> FuncPipe:
    return FuncPipe(model(), loss_fn=digits.loss, optimizer=digits.optimizer)


def data() -> TensorDataset:
    inputs, targets = digits.train_data().tensors
    return TensorDataset(inputs[: STEPS * 16], targets[: STEPS * 16])


def plan(size: str, memory_mb: int) -> Plan:
    """Two stages of two replicas, two micro-batches of four for each."""
    found = even_plan(model(), data()[:4][:1], 2, 2)
    return replace(found, stages=tuple(replace(s, size=size, memory_mb=memory_mb) for s in found.stages))


def digest_of(tensors: dict[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return total.hexdigest()


def show(progress: Progress) -> None:
    print(f"   step {progress.step} of {progress.steps}: loss {progress.loss:.6f}", flush=True)


def said(text: str) -> None:
    print(f"   {text}", flush=True)


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def oss_server() -> Iterator[OssServer]:
    server = OssServer()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


if __name__ == "__main__":
    main()
