"""Each object lies in the storage of its kind, and is found by every list."""

from pathlib import Path

import pytest

from funcpipe.core import CountsByKind, RequestCounts
from funcpipe.core.stores import storage_of, urls_by_kind
from funcpipe.errors import InvalidValue, KeyMissing
from funcpipe.platforms.base import RequestMeter
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.local.files import FileStorage
from funcpipe.platforms.wrappers import Routed, kind_of
from funcpipe.runstate.keys import Keys
from funcpipe.scheduler.tasks import Kind
from funcpipe.testing.memory_storage import MemoryStorage

KEYS = Keys("run-1", 3, "3fa9c2d1")


def key_of(kind: Kind) -> str:
    return KEYS.message("s0.r0", 7, f"{kind.value}.s0.r0.k2")


def test_what_is_put_has_the_kind_that_the_cost_model_counts_it_as() -> None:
    sums = {Kind.PUT_SPLIT, Kind.PUT_MERGED, Kind.PUT_TIED, Kind.PUT_TIED_SUM}
    for kind in (kind for kind in Kind if kind.is_put):
        assert kind_of(key_of(kind)) == ("sums" if kind in sums else "messages")
    assert kind_of(KEYS.checkpoint(0, "00000040.0")) == "checkpoints"
    for key in (KEYS.record, KEYS.lease("s0.r0", 1), KEYS.reservation, KEYS.parameters(0), "messages/x", "a"):
        assert kind_of(key) == "default"


def test_objects_go_apart_and_lists_find_them_all() -> None:
    stores = {kind: MemoryStorage() for kind in ("default", "messages", "sums", "checkpoints")}
    routed = Routed(stores)
    keys = {
        "default": KEYS.record,
        "messages": key_of(Kind.PUT_ACTIVATION),
        "sums": key_of(Kind.PUT_SPLIT),
        "checkpoints": KEYS.checkpoint(0, "1"),
    }
    for kind, key in keys.items():
        routed.put(key, kind.encode())
    for kind, store in stores.items():
        assert store.list("") == (keys[kind],)
        assert routed.get(keys[kind]) == kind.encode()
    assert routed.list(KEYS.run_prefix) == tuple(sorted(keys.values()))
    assert set(routed.list(KEYS.messages("s0.r0"))) == {keys["messages"], keys["sums"]}
    assert routed.list(KEYS.checkpoints) == (keys["checkpoints"],)
    routed.delete_many([*keys.values(), "run-1/missing"])
    assert not any(store.list("") for store in stores.values())


def test_requests_count_for_the_kind_of_their_object_and_lists_for_a_kind_of_the_store_that_is_asked(
    tmp_path: Path,
) -> None:
    meter = RequestMeter()
    here, there = tmp_path.as_uri() + "/here", tmp_path.as_uri() + "/there"
    storage = open_storage(f"default={here},sums={there},checkpoints={there}", meter=meter)
    storage.put(key_of(Kind.PUT_SPLIT), b"12345")
    storage.put(key_of(Kind.PUT_ACTIVATION), b"123")
    storage.put(KEYS.record, b"1")
    assert storage.get(key_of(Kind.PUT_SPLIT)) == b"12345"
    with pytest.raises(KeyMissing):
        storage.get(KEYS.checkpoint(0, "1"))
    storage.list(KEYS.checkpoints)
    storage.list(KEYS.run_prefix)
    storage.list(KEYS.step_reports)
    assert meter.by_kind == CountsByKind(
        default=RequestCounts(puts=1, lists=2, sent_bytes=1),
        messages=RequestCounts(puts=1, sent_bytes=3),
        sums=RequestCounts(puts=1, gets=1, lists=1, sent_bytes=5, received_bytes=5),
        checkpoints=RequestCounts(gets=1, empty_gets=1, lists=1),
    )
    assert meter.counts == RequestCounts(puts=3, gets=2, lists=4, empty_gets=1, sent_bytes=9, received_bytes=5)


def test_a_folder_is_listed_only_where_its_objects_may_be() -> None:
    class Refusing(MemoryStorage):
        def list(self, prefix: str) -> tuple[str, ...]:
            raise AssertionError(f"{prefix} cannot be here")

    apart = Routed(
        {"default": Refusing(), "messages": MemoryStorage(), "sums": MemoryStorage(), "checkpoints": Refusing()}
    )
    assert apart.list(KEYS.messages("s0.r0")) == ()
    only = Routed({"default": Refusing(), "checkpoints": MemoryStorage()})
    assert only.list(KEYS.checkpoints) == ()
    routed = Routed({"default": MemoryStorage(), "messages": Refusing()})
    for prefix in (KEYS.leases("s0.r0"), KEYS.step_reports, KEYS.reservations, KEYS.owner.owner_heartbeats):
        assert routed.list(prefix) == ()


def test_one_text_names_the_storages_of_all_kinds(tmp_path: Path) -> None:
    urls = {"default": f"{(tmp_path / 'd').as_uri()}", "sums": f"{(tmp_path / 's').as_uri()}"}
    text = storage_of(urls)
    assert urls_by_kind(text) == urls
    assert urls_by_kind("s3://bucket/a,b=c") == {"default": "s3://bucket/a,b=c"}
    store = open_storage(text)
    store.put(key_of(Kind.PUT_MERGED), b"1")
    assert FileStorage(tmp_path / "s").get(key_of(Kind.PUT_MERGED)) == b"1"


@pytest.mark.parametrize("text", ["messages=s3://a/b", "default=,sums=s3://a/b"])
def test_a_text_without_the_default_storage_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue, match="must have a URL for each kind it names, and for default"):
        open_storage(text)
    with pytest.raises(InvalidValue, match="must have URLs for default, messages, sums, checkpoints, got 'letters'"):
        storage_of({"default": "s3://a/b", "letters": "s3://a/c"})
