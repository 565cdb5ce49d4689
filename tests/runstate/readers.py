"""Every reader of what comes from outside, fed with what it should not be fed: nothing but our own errors may come.

Inputs are valid ones with bytes changed, cut, doubled or inserted, or with other JSON values; what carries a checksum
is sealed again, so that the reader behind it is reached.
"""

import json
import random
import struct
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from funcpipe.comm import codec
from funcpipe.core import Heartbeat, LayerProfile, Manifest, ModelProfile, Plan, TensorProfile, from_text, to_text
from funcpipe.errors import FuncPipeError
from funcpipe.runstate import documents as notes
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.keys import Keys, generation_of
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training import state as states
from funcpipe.training.norms import GradientNorm
from funcpipe.training.state import capture_state, restore_state
from tests.support.chaos import job

READ = "read"
LARGEST = 16
"""Times the bytes of a message that its tensors may take: bytes may travel for complex numbers of sixteen."""

_VALUES: tuple[Any, ...] = (None, True, -1, 0, 2**63, 1e308, "", "x", "../x", [], {}, [[]], {"tensor": 7})


PROFILE = ModelProfile(
    model="three layers",
    micro_batch=4,
    platform="local",
    sizes=("1024MB", "2048MB"),
    base_memory_bytes=300 << 20,
    layers=tuple(
        LayerProfile(
            name=f"layer{i}",
            parameter_bytes=i << 10,
            activation_bytes=i << 12,
            forward_s=(0.2, 0.1),
            backward_s=(0.4, 0.2),
        )
        for i in range(3)
    ),
    tensors=(TensorProfile(name="layer0", producer=0, consumers=(1, 2), forward_bytes=64, backward_bytes=64),),
)


@dataclass(frozen=True)
class Target:
    """A reader, inputs that it reads, and how a changed input is sealed."""

    valid: tuple[bytes, ...]
    read: Callable[[bytes], Any]
    seal: Callable[[bytes], bytes] = bytes
    is_json: bool = False


def targets() -> Mapping[str, Target]:
    """All readers by name."""
    messages = [{"a": torch.randn(3, 4), "b": torch.arange(5)}, {"c": torch.zeros(0, 2).bool()}, {}]
    plan, profile = to_text(job().plan).encode(), to_text(PROFILE).encode()
    storage, net = MemoryStorage(), nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    torch.autograd.backward(net(torch.randn(4, 3)).sum())
    optimizer.step()
    Checkpoints(storage, Keys("run-1")).save(0, 1, capture_state(net, optimizer, GradientNorm()), writer="w")
    (manifest_key,) = [key for key in storage.list("run-1/") if key.endswith(".json")]
    manifest = notes.get_document(storage, Manifest, manifest_key)
    return {
        "codec": Target(tuple(bytes(codec.encode(m)) for m in messages), _decode, _seal_message),
        "codec, unsealed": Target(tuple(bytes(codec.encode(m)) for m in messages), _decode),
        "keys": Target((b"run-1", b"s0.r1", b"put-activation.s0.r0.m1.k0"), _keys),
        "note": Target(
            (notes.encode_document(manifest),), lambda data: notes.decode_document(Heartbeat, data, source="note")
        ),
        "manifest": Target(
            (to_text(manifest).encode(),), lambda data: _load(storage, manifest_key, data), is_json=True
        ),
        "settings": Target((manifest.settings.encode(),), lambda data: _restore(storage, manifest, data), is_json=True),
        "plan": Target((plan,), lambda data: from_text(Plan, data, source="plan"), is_json=True),
        "profile": Target((profile,), lambda data: from_text(ModelProfile, data, source="profile"), is_json=True),
    }


def attack(target: Target, draw: random.Random) -> str:
    """Feed one changed input; the name of the error, or `READ`. What is no error of ours is raised."""
    data = changed(target, draw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            target.read(data)
        except FuncPipeError as error:
            return type(error).__name__
    return READ


def changed(target: Target, draw: random.Random) -> bytes:
    """A valid input with a few changes."""
    data = bytearray(draw.choice(target.valid))
    if target.is_json and draw.random() < 0.7:
        return json.dumps(_other_json(json.loads(data), draw)).encode()
    for _ in range(draw.choice((1, 1, 2, 5))):
        place, length = draw.randrange(len(data) + 1), draw.randrange(1, 9)
        match draw.randrange(4):
            case 0 if data:
                data[place % len(data)] = draw.randrange(256)
            case 1:
                del data[place : place + length]
            case 2:
                data[place:place] = draw.randbytes(length)
            case _:
                data[place:place] = data[place : place + length]
    return target.seal(bytes(data))


def _other_json(value: Any, draw: random.Random) -> Any:
    """`value` with one of its parts replaced by something else."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        name = draw.choice(sorted(value))
        if draw.random() < 0.1:
            return {key: item for key, item in value.items() if key != name}
        return {**value, name: _other_json(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.85:
        place = draw.randrange(len(value))
        return [*value[:place], _other_json(value[place], draw), *value[place + 1 :]]
    return draw.choice(_VALUES)


def _decode(data: bytes) -> None:
    found = codec.decode(data)
    taken = sum(tensor.nbytes for tensor in found.values())
    assert taken <= LARGEST * len(data), f"{taken} bytes from a message of {len(data)}"


def _seal_message(data: bytes) -> bytes:
    head = struct.Struct("<4sI28s")
    if len(data) < head.size:
        return data
    magic, length, _ = head.unpack_from(data)
    return head.pack(magic, length, xxhash.xxh3_64_digest(data[head.size :])) + data[head.size :]


def _keys(data: bytes) -> None:
    text = data.decode("utf-8", errors="replace")
    keys = Keys("run-1")
    for key in (keys.message(text, 1, "put"), keys.message("s0.r0", 1, text), keys.checkpoint(0, text)):
        assert key.startswith(keys.run_prefix), key
        assert generation_of(key) == keys, key
        assert all(part not in ("", ".", "..") for part in key.split("/")), key
    assert Keys(text).record.startswith(f"{text}/")


def _load(storage: MemoryStorage, key: str, data: bytes) -> None:
    """The checkpoint with another manifest; nothing outside its folder may be asked for."""
    seen = Watching(storage, key, notes.encode_document(from_text(Manifest, data, source="manifest")))
    Checkpoints(seen, Keys("run-1")).load(0, key.rpartition("/")[2])
    assert all(asked.startswith("run-1/g0000/checkpoints/s0/") for asked in seen.asked), seen.asked


class Watching(MemoryStorage):
    """The objects of another storage, one of them replaced; notes what is asked for."""

    def __init__(self, other: MemoryStorage, key: str, data: bytes) -> None:
        super().__init__()
        for name in other.list(""):
            self.put(name, other.get(name))
        self.put(key, data)
        self.asked: list[str] = []

    def get(self, key: str, **options: Any) -> bytes:
        self.asked.append(key)
        return super().get(key, **options)


def _restore(storage: MemoryStorage, manifest: Manifest, data: bytes) -> dict[str, Tensor]:
    """The checkpoint with other settings, put back into a stage."""
    (name,) = (name for _, name in Checkpoints(storage, Keys("run-1")).index().saved[0])
    whole = Checkpoints(storage, Keys("run-1")).load(0, name)
    net = nn.Linear(3, 2)
    settings = states.settings_from_text(data.decode("utf-8", errors="replace"))
    found = states.StageState(tensors=whole.tensors, aliases=manifest.aliases, transient=frozenset(), settings=settings)
    restore_state(found, net, torch.optim.Adam(net.parameters()), GradientNorm())
    return dict(found.state_dict())
