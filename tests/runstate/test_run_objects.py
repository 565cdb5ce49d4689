"""Which objects a run can have written: all that it writes, and nothing that others have."""

import inspect
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import WATCH_PREFIX, LeaseDocument, ServerFunctionSpec
from funcpipe.neighbours.parameter_server.function_connection import ServerKeys
from funcpipe.neighbours.parameter_server.server import data_key
from funcpipe.profiler.remote.function import ProbeKeys
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.functions import unmark_run
from funcpipe.runstate.generations import delete_generation, delete_objects, is_written
from funcpipe.runstate.keys import Keys, OwnerKeys
from funcpipe.runstate.reports import BestKeys, ValidationKeys
from funcpipe.testing.memory_storage import MemoryStorage
from tests.runstate.strange import RUN, strange

NAMES = {"data": "evaluation.shard-000007", "checkpoint": "00000004.0of2m.s0.r0.a00000000.0.safetensors"}
PARTS = {"worker": "s0.r0", "task": "put-split.s0.r1.p0.k2", "token": "0a1b2c3d"}


def made(keys: Keys, *kinds: type[Keys]) -> Iterator[tuple[str, str]]:
    """Every key that members of these classes make, with the member's name; not what keys only begin with."""
    for name, member in ((name, member) for kind in kinds for name, member in vars(kind).items()):
        if name.startswith("_") or name in ("of", "reserved"):
            continue
        if isinstance(member, property):
            value = getattr(keys, name)
        elif inspect.isfunction(member):
            asked = list(inspect.signature(member).parameters)[1:]
            value = member(keys, *(NAMES.get(name) if part == "name" else PARTS.get(part, 3) for part in asked))
        else:
            continue
        if isinstance(value, str) and "/" in value and not value.endswith("/"):
            yield name, value


@pytest.mark.parametrize("nonce", ["", "3fa9c2d11b0c77e4"])
def test_every_key_of_a_run_is_one_that_a_run_writes(nonce: str) -> None:
    keys = ValidationKeys(RUN, 12, nonce)
    found = [*made(keys, Keys, ValidationKeys), *made(keys.best, BestKeys), *made(keys.owner, OwnerKeys)]
    assert len(found) > 25
    assert [(name, key) for name, key in found if not is_written(key)] == []


def test_so_is_every_key_of_a_parameter_server_and_of_a_measurement() -> None:
    keys = ServerKeys(Keys(RUN, 0, "3fa9"))
    spec = ServerFunctionSpec(
        run=RUN,
        worker="m5.large-0",
        attempt=3,
        size="1GB",
        memory_mb=1024,
        storage="-",
        bundle_sha256="-",
        seed=0,
        message_deadline_s=1.0,
    )
    of_server = [keys.order(spec, 0), keys.message(spec, 7), keys.parameters(7), data_key(keys.root, "dataset.bundle")]
    saved = [f"{RUN}/server/checkpoints/0000000007.{end}" for end in ("json", "safetensors")]
    of_server += [data_key(RUN, "shard-000000"), *saved]
    layers, probes = ProbeKeys("profile-0123456789ab"), ProbeKeys("measure-0123456789ab")
    of_measurement = [layers.bundle(3), layers.tensors(3), layers.layer("1024MB", 3)]
    of_measurement += [probes.machine(0), probes.failure(0), probes.scratch(0)]
    assert [key for key in (*of_server, *of_measurement) if not is_written(key)] == []


def test_no_name_that_comes_close_is_one_that_a_run_writes() -> None:
    assert [key for key in strange() if key.startswith(f"{RUN}/") and is_written(key)] == []


words = st.text("abgz09-._", min_size=1, max_size=8)
paths = st.lists(
    words | st.sampled_from(["generations", "owner", "leases", "g0000-3fa9", "g0000", "checkpoints", "s0", "server"]),
    min_size=1,
    max_size=4,
).map("/".join)


@given(st.lists(paths, max_size=8))
def test_only_what_a_run_can_have_written_is_deleted(names: list[str]) -> None:
    """Of a run of which nothing else is known than that it was there."""
    storage, keys = MemoryStorage(), Keys(RUN, 0, "3fa9")
    own = [keys.reservation, keys.record, keys.record_copy, keys.bundle(0), keys.message("s0.r0", 0, "put")]
    for key in own:
        storage.put(key, b"own")
    put_document(storage, keys.owner.owner_lease(0, "0a"), LeaseDocument(holder="0a"))
    others = {f"{RUN}/{name}": name.encode() for name in names if not is_written(f"{RUN}/{name}")}
    others |= {f"{WATCH_PREFIX}{RUN}/{name}": b"mark" for name in names if "/" in name}
    for key, data in others.items():
        storage.put(key, data)
    delete_generation(storage, keys)
    found = delete_objects(storage, RUN)
    unmark_run(storage, RUN)
    assert set(found.others) == {key for key in others if key.startswith(f"{RUN}/")}
    assert {key: storage.get(key) for key in others} == others
    assert set(storage.list("")) - others.keys() == {keys.owner.owner_lease(0, "0a")}
