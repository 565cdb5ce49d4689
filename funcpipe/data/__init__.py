"""Datasets that lie in object storage, as factories for `train`: each function reads the shards of its own samples.

::

    from funcpipe import data

    pipe.train(data.mds("s3://bucket/images", transform=to_tensors), epochs=3, storage="s3://bucket/runs")

A URL alone, `pipe.train("s3://bucket/images")`, is read by what lies there. See docs/data.md.
"""

from funcpipe.data.dataset import SHUFFLE_SHARDS, ShardedDataset
from funcpipe.data.sources import CACHE_MB, DataFactory, from_url, litdata, mds, parquet, webdataset

__all__ = [
    "CACHE_MB",
    "SHUFFLE_SHARDS",
    "DataFactory",
    "ShardedDataset",
    "from_url",
    "litdata",
    "mds",
    "parquet",
    "webdataset",
]
