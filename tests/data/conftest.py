"""A bucket for datasets: on the S3 server that the environment names, or else on moto's."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from funcpipe.platforms.catalog import open_storage
from tests.s3_servers import S3Server, any_server

Upload = Callable[[Path], str]


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with any_server() as server:
        yield server


@pytest.fixture
def upload(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Upload:
    """Puts the files of a folder into the bucket; returns the URL of the dataset."""
    s3_server.use(monkeypatch)
    s3_server.make_bucket("funcpipe-data")

    def put(folder: Path) -> str:
        url = f"s3://funcpipe-data/{uuid.uuid4().hex}?endpoint={s3_server.endpoint}&region=us-east-1"
        storage = open_storage(url)
        for file in folder.iterdir():
            storage.put(file.name, file.read_bytes())
        return url

    return put
