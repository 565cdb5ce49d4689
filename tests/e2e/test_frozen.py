"""Runs with frozen parameters: these are in no checkpoint and no exchange, and are uploaded at most once."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from funcpipe import FuncPipe, export
from funcpipe.api import training
from funcpipe.cli.files import write_shards
from funcpipe.client.follow.export import load_saved
from funcpipe.client.prepare.frozen import mark_fixed
from funcpipe.client.prepare.session import Session, Site, session_on
from funcpipe.client.prepare.weights import ModelWeights, find_weights
from funcpipe.comm.signature import PROOF_BYTES
from funcpipe.core import FaultTolerance, Outcome, Plan, StoredFile
from funcpipe.errors import CorruptMessage, InputError, InvalidValue, PlanError, RunUnknown, WorkerFailed
from funcpipe.model.graph import trace
from funcpipe.model.split import split
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.platforms.catalog import load_spec
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.testing.faults import FunctionFaults
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform, one_at_a_time
from funcpipe.training.norms import GradientNorm
from funcpipe.training.state import capture_state, restore_state
from funcpipe.worker import hand_over
from tests.e2e.plans import even_plan
from tests.e2e.test_weights import SAMPLE, Model, data, loss, optimizer, write

RUN = "adapted"
STEADY = FaultTolerance(heartbeat_s=0.2, lease_s=60.0, checkpoint_steps=1, keep=True)


class Adapted(nn.Module):
    """A frozen linear layer, and what learns beside it."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x) + self.up(self.down(x))
        return result


class Lora(Model):
    """The model with adapters in its blocks but the first, and all else frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in list(self.blocks)[1:]:
            block.inner = Adapted(cast(nn.Linear, block.inner))


class Storage(MemoryStorage):
    """Storage that knows all that was ever put into it."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: list[tuple[str, bytes]] = []

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        super().put(key, data, if_absent=if_absent, gate=gate)
        self.puts.append((key, bytes(data)))

    def of(self, part: str) -> list[tuple[str, bytes]]:
        return [(key, contents) for key, contents in self.puts if part in key]


class Threads:
    """Functions that are threads, for one run after the other in the same storage."""

    def __init__(self) -> None:
        self.storage = Storage()
        self.platform: ThreadPlatform | None = None

    def train(
        self,
        model: nn.Module | Callable[[], nn.Module],
        plan: Plan,
        fails: FunctionFaults | None = None,
        faults: FaultTolerance = STEADY,
        **options: Any,
    ) -> tuple[FuncPipe, Any]:
        """Train, or go on with the run in the storage; the first function `fails`."""
        before, platform = (
            self.platform,
            ThreadPlatform(
                load_spec("local"),
                self.storage,
                faults_of=lambda number: fails if fails and number == 0 else FunctionFaults(),
            ),
        )
        self.platform = platform
        given = {name: options.pop(name) for name in ("weights", "average") if name in options}
        named: dict[str, Any] = {"run": RUN} if before is None else {"resume": RUN}

        @contextlib.contextmanager
        def session(*_: Any, **__: Any) -> Iterator[Session]:
            site = Site(platform, self.storage, "memory://")
            yield replace(session_on(site, reopen=(before or platform).open), lasts=True)

        pipe = FuncPipe(model, loss_fn=loss, optimizer=optimizer, **given)
        try:
            here = mock.patch.object(ModelWeights, "check_reachable")
            with one_at_a_time(), here, mock.patch.object(training, "open_session", session):
                return pipe, pipe.train(data(), plan=plan, faults=faults, progress=False, **named, **options)
        except PlanError:
            self.platform = before
            raise
        finally:
            platform.stop_all()

    def halted(self, model: nn.Module | Callable[[], nn.Module], plan: Plan, **options: Any) -> None:
        """Train until the first function dies in its second step."""
        fails = FunctionFaults(killed_writing=("/checkpoints/s0/00000002", 1))
        with pytest.raises(WorkerFailed):
            self.train(model, plan, fails, replace(STEADY, max_attempts=1), **options)


def made(seed: int = 1) -> Lora:
    torch.manual_seed(seed)
    return Lora()


def planned(stages: int = 3, replicas: int = 1) -> Plan:
    return even_plan(made(), SAMPLE, stages=stages, replicas=replicas, micro_batch=2, micro_batches=2 // replicas)


def alone(epochs: int = 1) -> Lora:
    """What one process makes of it, without shuffling."""
    model = made()
    own = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    samples = data()
    for first in range(0, len(samples), 4):
        ids, target = map(torch.stack, zip(*samples[first : first + 4], strict=True))
        own.zero_grad()
        loss(model(ids), target).backward()  # type: ignore[no-untyped-call]
        own.step()
    return model


def same(found: Any, expected: Any) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


WAYS = ["module", "weights"]


def way_in(way: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    if way == "module":
        return made(), {}
    return Lora, {"weights": str(write(made(), folder / "weights"))}


@pytest.mark.parametrize("way", WAYS)
def test_kills_and_hand_overs_cost_no_bit_and_checkpoints_hold_what_learns(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, options = way_in(way, tmp_path)
    threads, plan = Threads(), planned(2)
    fails = FunctionFaults(killed_writing=("/checkpoints/s0/00000002", 1))
    _, killed = threads.train(model, plan, fails, shuffle=False, **options)
    assert killed.bill.functions == 3
    monkeypatch.setattr(hand_over, "leaves_at_s", lambda *_: 0.0)
    other, options = way_in(way, tmp_path)
    faults = replace(STEADY, lifetime_s=600.0)
    again = Threads()
    _, handed = again.train(other, plan, faults=faults, shuffle=False, **options)
    assert sum(report.outcome is Outcome.HANDED_OVER for report in handed.workers) == 2 * 3
    expected = alone().state_dict()
    assert same(handed.state_dict(), killed.state_dict())
    assert all(torch.allclose(tensor, expected[name], atol=1e-6) for name, tensor in killed.state_dict().items())
    learning = {name for name, parameter in made().named_parameters() if parameter.requires_grad}
    for storage in (threads.storage, again.storage):
        saved = storage.of("/checkpoints/s")
        files = [
            safetensors.torch.load(contents[: -2 * PROOF_BYTES - 1])
            for key, contents in saved
            if key.endswith(".safetensors")
        ]
        held = {name.partition("/")[2] for file in files for name in file if name.startswith("model/")}
        assert held == learning
        uploaded = [key for key, _ in storage.of("/base/") if key.endswith(".safetensors")]
        assert len(uploaded) == (way == "module")


def test_nothing_is_computed_or_sent_back_in_front_of_what_learns() -> None:
    threads = Threads()
    threads.train(made(), planned(3, replicas=2))
    messages = {key.rpartition("/")[2].partition(".m")[0] for key, _ in threads.storage.of("/messages/")}
    assert any(name.startswith("put-activation.s0") for name in messages)
    assert not [name for name in messages if name.startswith("put-gradient.s1")]


@pytest.mark.parametrize("way", WAYS)
def test_a_run_goes_on_by_another_plan_with_the_base_that_it_began_with(way: str, tmp_path: Path) -> None:
    model, options = way_in(way, tmp_path)
    threads = Threads()
    threads.halted(model, planned(2), shuffle=False, **options)
    uploaded = len(threads.storage.of("/base/"))
    other = made(seed=2) if way == "module" else Lora
    pipe, result = threads.train(other, planned(3, replicas=2), shuffle=False, **options)
    again = [key for key, _ in threads.storage.of("/base/")[uploaded:] if key.endswith(".safetensors")]
    assert not again
    expected = alone().state_dict()
    found = result.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.allclose(tensor, expected[name], atol=1e-6) for name, tensor in found.items())
    if way == "module":
        assert same(pipe.model.state_dict(), found)
    exported = export(RUN, storage=threads.storage)
    assert same(exported, found)
    held = made(seed=3)
    FuncPipe(held, loss_fn=loss).load(RUN, storage=threads.storage)
    assert same(held.state_dict(), found)
    assert torch.equal(torch.load(_saved(exported, tmp_path))["embed.weight"], expected["embed.weight"])


def _saved(state: Any, folder: Path) -> Path:
    torch.save(state, folder / "model.pt")
    return folder / "model.pt"


def test_what_is_frozen_must_stay_so_when_a_run_goes_on(tmp_path: Path) -> None:
    threads = Threads()
    threads.halted(made(), planned(2))
    thawed, colder = made(), made()
    thawed.embed.requires_grad_(True)
    colder.get_submodule("blocks.1.inner.up").requires_grad_(False)
    message = "embed.weight is trainable, and was frozen in the run that is to go on"
    with pytest.raises(PlanError, match=message):
        threads.train(thawed, planned(2))
    with pytest.raises(PlanError, match=r"blocks\.1\.inner\.up\.weight is frozen, and the run .* has trained it"):
        threads.train(colder, planned(2))


def test_other_weights_are_refused_and_the_same_elsewhere_are_not(tmp_path: Path) -> None:
    threads = Threads()
    threads.halted(Lora, planned(2), weights=str(write(made(), tmp_path / "weights")))
    with pytest.raises(PlanError, match=r"has begun with the weights in .*weights/model-0.* is another file"):
        threads.train(Lora, planned(2), weights=str(write(made(), tmp_path / "others", files=3)))
    (tmp_path / "weights").rename(tmp_path / "moved")
    _, result = threads.train(Lora, planned(2), shuffle=True, weights=str(tmp_path / "moved"))
    assert same(export(RUN, storage=threads.storage), result.state_dict())


def test_what_no_file_has_and_no_step_changes_is_computed_once_and_uploaded(tmp_path: Path) -> None:
    threads = Threads()
    folder = str(write(made(), tmp_path, without="blocks.0.inner"))
    _, result = threads.train(Lora, planned(2), weights=folder)
    files = [contents for key, contents in threads.storage.of("/base/") if key.endswith(".safetensors")]
    assert [sorted(safetensors.torch.load(file)) for file in files] == [
        ["blocks.0.inner.bias", "blocks.0.inner.weight"]
    ]
    (contents,) = map(safetensors.torch.load, files)
    assert torch.equal(result.state_dict()["blocks.0.inner.weight"], contents["blocks.0.inner.weight"])


def test_a_base_that_is_gone_is_named() -> None:
    threads = Threads()
    threads.halted(made(), planned(2))
    for key in [key for key in threads.storage.list("") if "/base/" in key and key.endswith(".json")]:
        threads.storage.delete(key)
    with pytest.raises(RunUnknown, match="where its frozen tensors lie is not known"):
        threads.train(made(), planned(2))


def test_a_fixed_tensor_that_code_changes_all_the_same_is_saved() -> None:
    graph = trace(made(), SAMPLE)
    (stage,) = split(graph, [(0, len(graph.layers))])
    mark_fixed([stage], ())
    stage.settle()
    before = capture_state(stage, None, GradientNorm())
    with torch.no_grad():
        stage.get_parameter("blocks.0.norm.bias").add_(1)
    after = capture_state(stage, None, GradientNorm())
    assert after.tensors.keys() - before.tensors.keys() == {"model/blocks.0.norm.bias"}
    restore_state(after, stage, None, GradientNorm())
    with pytest.raises(CorruptMessage, match="does not match its stage"):
        restore_state(before, stage, None, GradientNorm())


def test_a_run_is_exported_shard_by_shard(tmp_path: Path) -> None:
    threads = Threads()
    _, result = threads.train(made(), planned(2))
    saved = load_saved(RUN, storage=threads.storage, opened=True)
    assert (saved.step, saved.steps) == (4, 4)
    seen: list[str] = []
    read = Checkpoints._tensors

    def counted(self: Checkpoints, stage: int, file: StoredFile) -> dict[str, Tensor]:
        seen.append(file.name)
        return read(self, stage, file)

    with mock.patch.object(Checkpoints, "_tensors", counted):
        write_shards(saved.state_dict(), str(tmp_path / "model"), shard_bytes=600)
    assert len(seen) == 2, "each file of the checkpoint is read once"
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert set(index["weight_map"].values()) == {file.name for file in (tmp_path / "model").glob("*.safetensors")}
    found = {
        name: tensor
        for file in (tmp_path / "model").glob("*.safetensors")
        for name, tensor in safetensors.torch.load_file(file).items()
    }
    assert same(found, result.state_dict())
    assert find_weights(tmp_path / "model").keys() == found.keys()
    with pytest.raises(InputError, match="is a folder with files in it"):
        write_shards(saved.state_dict(), str(tmp_path / "model"))
    with pytest.raises(InvalidValue, match="must be a step that run adapted has saved"):
        load_saved(RUN, storage=threads.storage, step=3, opened=True)
