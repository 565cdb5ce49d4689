"""A run that an earlier funcpipe of the same format started can be found, watched and stopped."""

import json
from dataclasses import replace

import xxhash

from funcpipe.core import RunRecord, to_text
from funcpipe.runstate.generations import load_worker_specs, newest_record, reserve_generation, write_record
from funcpipe.runstate.keyring import KeyFolder, signed
from funcpipe.runstate.signed_storage import key_of
from funcpipe.testing.memory_storage import MemoryStorage
from tests.core.test_run import OLD_LIFE, spec


def test_a_run_is_found_by_the_payloads_of_an_earlier_funcpipe() -> None:
    storage = signed(MemoryStorage())
    keys = reserve_generation(storage, "run-1")
    record = RunRecord(
        run="run-1",
        generation=0,
        nonce=keys.nonce,
        plan=spec().plan,
        platform="local:///unused",
        storage="memory://",
        samples=8,
        epochs=1,
        steps=1,
        first_step=0,
        seed=0,
        shuffle=True,
        clip_grad_norm=None,
    )
    write_record(storage, keys, record)
    document = json.loads(to_text(spec()))
    old = {name: value for name, value in document.items() if name not in ("faults", "limits", "account")}
    text = (json.dumps(old | {"life": OLD_LIFE}) + "\n").encode()
    storage.put(keys.payload("s1.r0"), text + f"{xxhash.xxh3_64_hexdigest(text)}\n".encode())
    assert newest_record(storage, "run-1") == record
    assert load_worker_specs(storage, keys) == (replace(spec(), run_key=key_of(KeyFolder(), keys).text),)
