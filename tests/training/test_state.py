"""A stage's state: taken, saved and put back. Those of stages are merged in `test_state_groups.py`."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import funcpipe.runstate.checkpoints as checkpoints_module
from funcpipe.errors import CorruptMessage, KeyMissing, ModelError, PlanError, RunUnknown
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.platforms.process import PeakMemory, peak_memory_bytes
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.keys import Keys
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.norms import GradientNorm, LossScale
from funcpipe.training.state import StageState, capture_state, restore_state, select_for_stage

Optimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: list[Optimizer] = [
    partial(torch.optim.SGD, lr=0.1),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    partial(torch.optim.Adam, lr=0.1),
    partial(torch.optim.AdamW, lr=torch.tensor(0.1), amsgrad=True),
    partial(torch.optim.Adadelta),
    partial(torch.optim.Adagrad),
    partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    partial(torch.optim.NAdam),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.b = nn.Linear(4, 3)
        self.tied = nn.Linear(3, 4)
        self.tied.weight = self.a.weight
        self.cache: Tensor
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.b.weight.data = self.b.weight.data.t().contiguous().t()  # not contiguous

    def forward(self, x: Tensor) -> Tensor:
        self.cache += 1
        result: Tensor = self.b(self.norm(self.tied(self.b(self.norm(self.a(x))))))
        return result


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(5, 3, generator=draw)

        optimizer.zero_grad()
        torch.autograd.backward(model(x).square().mean())
        optimizer.step()


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: make.func.__name__)
def test_a_stage_that_is_put_back_goes_on_with_the_same_bits(make: Optimizer) -> None:
    model = Net()
    optimizer = make(model.parameters())
    trained(model, optimizer, 3)
    checkpoints = Checkpoints(MemoryStorage(), Keys("run-1"), file_bytes=100)
    checkpoints.save(0, 3, capture_state(model, optimizer, GradientNorm()), writer="w")
    checkpoints.mark_done((0, 0), 3)
    other = Net()
    restored = make(other.parameters())
    step, state = checkpoints.load_latest((0, 0))
    assert step == 3
    assert state is not None
    restore_state(state, other, restored, GradientNorm())
    trained(model, optimizer, 3, seed=1)
    trained(other, restored, 3, seed=1)
    for name, tensor in {**model.state_dict(), "cache": model.cache}.items():
        assert torch.equal(tensor, {**other.state_dict(), "cache": other.cache}[name]), name


def test_the_state_dict_has_all_names_and_no_transient_buffer() -> None:
    model = Net()
    found = capture_state(model, None, GradientNorm()).state_dict()
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


def test_the_scale_of_the_loss_is_kept() -> None:
    norm, other = GradientNorm(loss_scale=LossScale(8.0, 7)), GradientNorm(loss_scale=LossScale())
    model = nn.Linear(2, 2)
    restore_state(capture_state(model, None, norm), model, None, other)
    assert other.loss_scale == LossScale(8.0, 7)


def test_checkpoints_of_another_model_are_refused() -> None:
    state = capture_state(nn.Linear(2, 3), None, GradientNorm())
    with pytest.raises(PlanError, match=r"'weight' has shape \[3, 2\] of torch.float32 there, \[2, 2\]"):
        select_for_stage(state, nn.Linear(2, 2))
    with pytest.raises(PlanError, match=r"they do not hold '0\.weight'"):
        select_for_stage(state, nn.Sequential(nn.Linear(2, 3)))


def test_an_optimiser_that_keeps_what_is_not_data_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["callback"] = print
    with pytest.raises(ModelError, match=r"the optimiser keeps a builtin_function_or_method \(optimizer/weight/callb"):
        capture_state(model, optimizer, GradientNorm())


def saved(storage: MemoryStorage, steps: list[int], stage: int = 0) -> Checkpoints:
    checkpoints = Checkpoints(storage, Keys("run-1"), file_bytes=20)
    for step in steps:
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, step)
        checkpoints.save(stage, step, capture_state(model, None, GradientNorm()), writer="s0.r0.a00000000")
    return checkpoints


class Interrupted(MemoryStorage):
    """Breaks down in its nth put."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.left = last

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        super().put(key, data, if_absent=if_absent, gate=gate)


def test_whoever_is_interrupted_leaves_the_checkpoint_before_whole() -> None:
    puts = len(saved(MemoryStorage(), [1])._storage.list("run-1/"))
    assert puts == 3
    for last in range(puts):
        storage = Interrupted(puts + last)
        with pytest.raises(KeyboardInterrupt):
            saved(storage, [1, 2])
        storage.left = 1
        found = Checkpoints(storage, Keys("run-1"))
        found.mark_done((0, 0), 2)
        step, state = found.load_latest((0, 0))
        assert step == 1
        assert state is not None
        assert state.state_dict()["weight"].eq(1).all()


def test_a_file_that_was_changed_is_found_out_and_named() -> None:
    storage = MemoryStorage()
    checkpoints = saved(storage, [1])
    checkpoints.mark_done((0, 0), 1)
    (key,) = [key for key in storage.list("run-1/") if key.endswith(".0.safetensors")]
    data = storage.get(key)
    storage.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(RunUnknown, match=r"run-1/g0000/checkpoints/s0/00000001.*0\.safetensors is not what"):
        checkpoints.load_latest((0, 0))
    storage.put(key, data[:-1])
    with pytest.raises(RunUnknown, match="its length or its SHA-256 differs"):
        checkpoints.load_latest((0, 0))


def test_the_newest_and_those_that_others_lack_are_kept() -> None:
    storage = MemoryStorage()
    saved(storage, [2, 4, 6, 8], stage=0)
    checkpoints = saved(storage, [2, 4], stage=1)
    for worker, step in (((0, 0), 8), ((0, 1), 7), ((1, 0), 4), ((1, 1), 5)):
        checkpoints.mark_done(worker, step)
    listing = checkpoints.index()
    assert listing.common_step(2, 2) == 4
    assert [listing.restart_step(worker) for worker in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2))] == [8, 6, 4, 4, 0]
    assert [name[:8] for name in listing.outdated(0, 2, 2)] == ["00000002"]
    assert listing.outdated(1, 2, 2) == ()
    checkpoints.delete(0, listing.outdated(0, 2, 2), listing)
    assert [step for step, _ in checkpoints.index().saved[0]] == [4, 6, 8]
    assert not any("/s0/00000002" in key for key in storage.list("run-1/"))


def test_a_worker_starts_again_no_later_than_it_had_come() -> None:
    """Its stage may have been saved by another replica after a step in which it had not written everything."""
    checkpoints = saved(MemoryStorage(), [2, 4])
    assert checkpoints.load_latest((0, 1)) == (0, None)
    checkpoints.mark_done((0, 1), 3)
    assert checkpoints.load_latest((0, 1))[0] == 2
    checkpoints.mark_done((0, 1), 4)
    assert checkpoints.load_latest((0, 1))[0] == 4
    assert len(checkpoints._storage.list("run-1/g0000/progress/")) == 2  # the last two


def test_a_stage_that_was_never_saved_has_no_common_step_but_the_first() -> None:
    checkpoints = saved(MemoryStorage(), [2])
    checkpoints.mark_done((1, 0), 2)
    assert checkpoints.index().common_step(2, 1) == 0
    assert checkpoints.load_latest((1, 0)) == (0, None)


@pytest.mark.parametrize("left", range(3), ids=["manifest", "header", "tensors"])
def test_a_checkpoint_that_vanishes_while_it_is_read_is_looked_for_again(
    monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    monkeypatch.setattr(checkpoints_module, "FILE_BYTES", 0)  # so that tensors are read while they are restored
    storage = Vanishing()
    checkpoints = saved(storage, [1, 2])
    checkpoints.mark_done((0, 0), 2)
    storage.left = left
    other = nn.Linear(2, 2)
    step, _ = checkpoints.load_latest((0, 0), lambda state: restore_state(state, other, None, GradientNorm()))
    assert step == 1
    assert other.weight.eq(1).all()


def test_a_large_checkpoint_is_restored_a_file_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = Net(), Net()
    optimizer, restored = (torch.optim.Adam(each.parameters(), lr=0.1) for each in (model, other))
    trained(model, optimizer, 2)
    checkpoints = Checkpoints(MemoryStorage(), Keys("run-1"), file_bytes=100)
    checkpoints.save(0, 2, capture_state(model, optimizer, GradientNorm()), writer="w")
    checkpoints.mark_done((0, 0), 2)
    monkeypatch.setattr(checkpoints_module, "FILE_BYTES", 0)
    own, files = checkpoints_module.deserialised, list[list[weakref.ref[Tensor]]]()

    def watched(key: str, data: bytes) -> dict[str, Tensor]:
        assert not [tensor for file in files for tensor in file if tensor() is not None], "another file is in memory"
        found = own(key, data)
        files.append([weakref.ref(tensor) for tensor in found.values()])
        return found

    monkeypatch.setattr(checkpoints_module, "deserialised", watched)
    checkpoints.load_latest((0, 0), lambda state: restore_state(state, other, restored, GradientNorm()))
    assert len(files) > 5
    expected = capture_state(model, optimizer, GradientNorm())
    found = capture_state(other, restored, GradientNorm())
    assert found.settings == expected.settings
    assert all(torch.equal(tensor, expected.tensors[name]) for name, tensor in found.tensors.items())


class Vanishing(MemoryStorage):
    """Loses the second checkpoint when something of it is read, after so many requests that are `left`."""

    left: int | None = None

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        if self.left is not None and "/00000002" in key:
            self.left -= 1
            if self.left >= 0:
                return super().get(key, start=start, stop=stop, gate=gate)
            for other in self.list("run-1/g0000/checkpoints/s0/00000002"):
                self.delete(other)
            raise KeyMissing(key)
        return super().get(key, start=start, stop=stop, gate=gate)


def test_what_does_not_match_is_refused() -> None:
    state = capture_state(nn.Linear(2, 3), None, GradientNorm())
    with pytest.raises(CorruptMessage, match="a checkpoint does not match its stage"):
        restore_state(state, nn.Linear(2, 2), None, GradientNorm())
    empty = StageState(tensors={}, aliases={}, transient=frozenset(), settings={"optimizer": None, "loss_scale": None})
    with pytest.raises(CorruptMessage, match="a checkpoint does not match its stage: KeyError"):
        restore_state(empty, nn.Linear(2, 2), None, GradientNorm())


def test_tensors_in_the_same_memory_are_saved() -> None:
    whole = torch.arange(3.0)
    settings = {"optimizer": None, "loss_scale": None}
    tensors = {"model/a": whole, "model/b": whole.view(3)}
    state = StageState(tensors=tensors, aliases={}, transient=frozenset(), settings=settings)
    checkpoints = Checkpoints(MemoryStorage(), Keys("run-1"))
    checkpoints.save(0, 2, state, writer="s0.r0.a00000000")
    found = checkpoints.load(0, "00000002.s0.r0.a00000000.json")
    assert all(torch.equal(found.tensors[name], whole) for name in tensors)


class Forgetful(MemoryStorage):
    """Keeps nothing of what is put."""

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        pass


def test_one_file_of_a_checkpoint_is_twice_in_memory_while_it_is_written() -> None:
    """Four files of 64 MB: a third copy would be 192 MB."""
    tensors = {f"model/{i}": torch.ones(16 << 20) for i in range(4)}
    state = StageState(tensors=tensors, aliases={}, transient=frozenset(), settings={})
    peak, before_bytes = PeakMemory(), peak_memory_bytes()
    Checkpoints(Forgetful(), Keys("run-1")).write_files(0, 2, state, writer="s0.r0.a00000000")
    assert peak.peak_bytes() - before_bytes < (128 + 32) << 20
