"""What somebody could make a run do who may write to its storage, if its objects were not signed."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from funcpipe.client.control.status import status
from funcpipe.client.control.stopping import stop
from funcpipe.core import Halt, to_text
from funcpipe.errors import CorruptMessage, RunKeyMissing
from funcpipe.platforms.catalog import open_platform
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.documents import encode_document, get_document, put_document
from funcpipe.runstate.generations import (
    find_record,
    load_payload,
    newest_record,
    write_payload,
    write_record,
)
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.signing import OneKey, SignedStorage, signed
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.norms import GradientNorm
from funcpipe.training.state import capture_state
from funcpipe.worker.setup import load_worker
from tests.core.test_run import spec
from tests.run_documents import RECORD
from tests.runstate.test_signed_storage import FORGERIES, KEY, KEYS, ORDER, OTHER, by_another
from tests.support.run_keys import NONCE, RUN_KEY, signed_for_tests

OURS = replace(RECORD, nonce=NONCE)


def test_a_run_whose_key_is_not_known_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    theirs = Keys("run-1", 0, OTHER.fingerprint)
    write_record(by_another(storage), theirs, replace(RECORD, nonce=theirs.nonce))
    put_document(by_another(storage), theirs.reservation, ORDER)
    said = (
        r"the key of run run-1 is not on this machine.*"
        r"`funcpipe run status run-1 --key` prints it: set FUNCPIPE_RUN_KEY to that here; "
    )
    verbs: tuple[Callable[..., Any], ...] = (status, stop)
    for verb in verbs:
        with pytest.raises(RunKeyMissing, match=said):
            verb(storage, "run-1", open_platform)
    with pytest.raises(RunKeyMissing, match=said):
        newest_record(signed_for_tests(storage), "run-1")  # a function of another run
    with pytest.raises(RunKeyMissing, match=said):
        signed(storage).put(theirs.halt, encode_document(ORDER))
    monkeypatch.setenv("FUNCPIPE_RUN_KEY", OTHER.text)
    assert newest_record(signed(storage), "run-1").nonce == theirs.nonce


def test_a_run_of_an_earlier_version_has_no_key_and_is_refused() -> None:
    storage = MemoryStorage()
    put_document(storage, Keys("run-1").reservation, ORDER)
    write_record(storage, Keys("run-1"), RECORD)
    with pytest.raises(RunKeyMissing):
        newest_record(signed(storage), "run-1")


def test_a_record_that_names_another_storage_or_platform_is_refused() -> None:
    """By which a client would send its credentials to a server of somebody's."""
    storage = MemoryStorage()
    own = signed_for_tests(storage)
    put_document(own, KEYS.reservation, ORDER)
    write_record(own, KEYS, OURS)
    theirs = replace(OURS, platform="aliyun-fc://funcpipe?region=cn-test&endpoint=http://there")
    for forgery in FORGERIES.values():
        for key in KEYS.records:
            storage.put(key, forgery(key, encode_document(theirs)))
        with pytest.raises(CorruptMessage, match="is not signed by its run"):
            find_record(own, KEYS)
    write_record(own, KEYS, OURS)
    storage.put(KEYS.record, encode_document(theirs))
    assert find_record(own, KEYS) == OURS  # its copy


def test_a_generation_that_somebody_has_added_is_not_gone_on_with() -> None:
    storage = MemoryStorage()
    own = signed_for_tests(storage)
    put_document(own, KEYS.reservation, ORDER)
    write_record(own, KEYS, OURS)
    theirs = Keys("run-1", 1, OTHER.fingerprint)
    put_document(by_another(storage), theirs.reservation, ORDER)
    write_record(by_another(storage), theirs, replace(RECORD, generation=1, nonce=theirs.nonce))
    with pytest.raises(RunKeyMissing):
        newest_record(signed(storage), "run-1")
    later = Keys("run-1", 1, NONCE)  # by the name of our key
    for key in storage.list(theirs.run_prefix):
        if theirs.nonce in key:
            storage.put(key.replace(theirs.nonce, NONCE), storage.get(key))
            storage.delete(key)
    assert later.record in storage.list("")
    with pytest.raises(CorruptMessage, match="is not signed by its run"):
        newest_record(signed(storage), "run-1")


def test_a_payload_in_storage_holds_no_key_and_cannot_be_changed() -> None:
    storage = MemoryStorage()
    own, told = signed_for_tests(storage), replace(spec(), nonce=NONCE, run_key=RUN_KEY.text)
    write_payload(own, KEYS, told)
    key = KEYS.payload(told.worker)
    assert RUN_KEY.text.encode() not in storage.get(key)
    assert load_payload(own, KEYS, told.worker, RUN_KEY) == told
    planted = json.loads(to_text(told)) | {"bundle": KEYS.checkpoint(0, "planted"), "bundle_sha256": "0" * 64}
    assert planted["format"] == told.FORMAT
    other = replace(told, bundle=planted["bundle"], bundle_sha256=planted["bundle_sha256"], run_key="")
    for forgery in FORGERIES.values():
        storage.put(key, forgery(key, encode_document(other)))
        with pytest.raises(CorruptMessage, match=f"{key} is not signed by its run"):
            load_payload(own, KEYS, told.worker, RUN_KEY)


def test_code_and_parameters_are_read_only_if_the_run_has_put_them() -> None:
    storage = MemoryStorage()
    own = signed_for_tests(storage)
    code = b"pickled code"
    told = replace(
        spec(),
        nonce=NONCE,
        run_key=RUN_KEY.text,
        bundle=KEYS.bundle(0),
        bundle_sha256=hashlib.sha256(code).hexdigest(),
        parameters=KEYS.parameters(0),
    )
    for forgery in FORGERIES.values():
        storage.put(KEYS.bundle(0), forgery(KEYS.bundle(0), code))  # with the right hash, which the payload may lie of
        with pytest.raises(CorruptMessage, match=f"{KEYS.bundle(0)} is not signed by its run"):
            load_worker(told, own, open_platform)


def test_checkpoints_are_those_of_the_run_its_stage_and_its_step() -> None:
    storage = MemoryStorage()
    checkpoints = Checkpoints(signed_for_tests(storage), KEYS)
    for step in (1, 2):
        checkpoints.save(0, step, capture_state(nn.Linear(3, 2), None, GradientNorm()), writer="w")
    (_, first), (_, second) = checkpoints.index().saved[0]
    kept = {key: storage.get(key) for key in storage.list(KEYS.checkpoints)}
    assert checkpoints.load(0, second).tensors

    storage.put(KEYS.checkpoint(0, second), kept[KEYS.checkpoint(0, first)])
    with pytest.raises(CorruptMessage, match="is not signed by its run"):
        checkpoints.load(0, second)
    storage.put(KEYS.checkpoint(1, first), kept[KEYS.checkpoint(0, first)])
    with pytest.raises(CorruptMessage, match="is not signed by its run"):
        checkpoints.load(1, first)
    later = second.replace("00000002", "00000009")
    for key, data in kept.items():
        if "00000002" in key:
            storage.put(key.replace("00000002", "00000009"), data)
    with pytest.raises(CorruptMessage, match="is not signed by its run"):
        checkpoints.load(0, later)

    storage.put(KEYS.checkpoint(0, second), kept[KEYS.checkpoint(0, second)])
    (old,) = [key for key in kept if "00000001" in key and key.endswith(".safetensors")]
    (new,) = [key for key in kept if "00000002" in key and key.endswith(".safetensors")]
    storage.put(new, kept[old])
    with pytest.raises(CorruptMessage, match="is not what its manifest says"):
        checkpoints.load(0, second)


def test_functions_of_another_run_cannot_speak_for_this_one() -> None:
    """They write by the same role into the same bucket, with their own run's key."""
    storage = MemoryStorage()
    theirs = SignedStorage(storage, OneKey(OTHER))
    with pytest.raises(RunKeyMissing):
        put_document(theirs, KEY, ORDER)
    assert storage.list("") == ()
    put_document(by_another(storage), KEY, ORDER)
    with pytest.raises(CorruptMessage, match="is not signed by its run"):
        get_document(signed_for_tests(storage), Halt, KEY)
