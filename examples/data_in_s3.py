"""Write images to S3 as Parquet, and train on their URL with two functions, each of which reads its own half.

    pip install 'funcpipe-torch[aws,parquet]'
    python data_in_s3.py BUCKET

The bucket must exist. Region, credentials and endpoint (AWS_ENDPOINT_URL) are boto3's. The data is deleted afterwards.
"""

import io
import sys
import uuid
from functools import partial

import boto3
import torch
from pyarrow import Table
from pyarrow.parquet import write_table
from torch import Tensor, nn

from funcpipe import FuncPipe, data

FILES, GROUPS, GROUP_SAMPLES, SIDE = 4, 8, 32, 32
GLOBAL_BATCH, MICRO_BATCH = 64, 16


def parquet_file(draw: torch.Generator) -> bytes:
    """Noisy images of three colours in row groups, which are what functions read; the label is the brightest colour."""
    labels = torch.randint(3, (GROUPS * GROUP_SAMPLES,), generator=draw)
    images = torch.randint(160, (len(labels), 3, SIDE, SIDE), generator=draw, dtype=torch.uint8)
    images[torch.arange(len(labels)), labels] += 40
    table = Table.from_pydict({"image": [image.numpy().tobytes() for image in images], "label": labels.tolist()})
    file = io.BytesIO()
    write_table(table, file, row_group_size=GROUP_SAMPLES)
    return file.getvalue()


def to_tensors(sample: dict[str, object]) -> tuple[Tensor, Tensor]:
    """A row of the files as what the model trains on; functions call it."""
    image = torch.frombuffer(bytearray(sample["image"]), dtype=torch.uint8).view(3, SIDE, SIDE)
    return image.float() / 255, torch.as_tensor(sample["label"])


def network() -> nn.Module:
    """Few parameters, so that nearly all that functions read is data."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )


def train(url: str, written_bytes: int) -> None:
    """One epoch over two replicas; then say what each function has read, messages and code included."""
    torch.manual_seed(0)
    pipe = FuncPipe(network(), loss_fn=nn.functional.cross_entropy, optimizer=partial(torch.optim.Adam, lr=0.03))
    pipe.profile(torch.rand(MICRO_BATCH, 3, SIDE, SIDE), micro_batch=MICRO_BATCH, platform="local", repeats=2)
    pipe.optimize(global_batch=GLOBAL_BATCH, time_value=3.84, replicas=2)
    result = pipe.train(data.parquet(url, output=None, transform=to_tensors), epochs=1)
    print(f"{len(result.losses)} steps: loss {result.losses[0]:.2f} -> {result.losses[-1]:.2f}")
    for worker in result.workers:
        share = worker.received_bytes / written_bytes
        print(
            f"{worker.worker} read {worker.received_bytes:,} bytes, {share:.0%} of the data, in {worker.gets} requests"
        )


def main() -> None:
    """Write, train, delete."""
    s3, bucket, prefix = boto3.client("s3"), sys.argv[1], f"images-{uuid.uuid4().hex[:8]}"
    draw = torch.Generator().manual_seed(0)
    files = {f"{prefix}/part-{number}.parquet": parquet_file(draw) for number in range(FILES)}
    try:
        for key, content in files.items():
            s3.put_object(Bucket=bucket, Key=key, Body=content)
        train(f"s3://{bucket}/{prefix}", sum(map(len, files.values())))
    finally:
        for key in files:
            s3.delete_object(Bucket=bucket, Key=key)


if __name__ == "__main__":
    main()
