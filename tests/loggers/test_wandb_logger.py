"""Steps in W&B, without its servers: what is written for `wandb sync` is read back from its files."""

import importlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from funcpipe.loggers import WandbLogger
from tests.loggers import runs

pytestmark = pytest.mark.filterwarnings("ignore")


def history(folder: Path) -> list[dict[str, Any]]:
    """The rows that runs have logged, in order of their time."""
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")

    found = []
    for path in folder.rglob("*.wandb"):
        for data in records(path.read_bytes()):
            record = messages.Record()
            record.ParseFromString(data)
            if record.HasField("history"):
                items = record.history.item
                found.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    return sorted(found, key=lambda row: float(row["_timestamp"]))


def records(data: bytes) -> Iterator[bytes]:
    """The records of a file of W&B, which is a log of LevelDB behind a header of seven bytes."""
    place, parts = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_a_resumed_run_goes_on_under_the_same_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="W&B is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    loggers = [WandbLogger("tests", directory=tmp_path, mode="offline") for _ in range(2)]
    runs.interrupted_and_resumed(*loggers)
    wandb.teardown()  # waits until all is written
    steps = [(row["_step"], row["loss"]) for row in history(tmp_path) if "loss" in row]
    assert steps == list(enumerate(runs.LOSSES, start=1))
    assert [row["_step"] for row in history(tmp_path) if "val_loss" in row] == [2, 4, 6]
    ids = {path.name.removesuffix(".wandb").removeprefix("run-") for path in tmp_path.rglob("*.wandb")}
    assert ids == {json.loads((tmp_path / f"funcpipe-{runs.RUN}.json").read_text())["id"]}
