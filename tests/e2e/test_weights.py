"""Runs whose weights lie in safetensors files equal those of the same module in the client's memory, to the bit."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from funcpipe.api import FuncPipe
from funcpipe.client.prepare.job import Learner, SampleOrder, make_job
from funcpipe.client.prepare.stages import RunData, make_stages
from funcpipe.client.prepare.weights import find_weights, open_model
from funcpipe.core import ModelProfile, RunSettings, from_text, to_text
from funcpipe.errors import DataError, InvalidValue, ModelError, PlatformRefused
from funcpipe.model.graph import trace
from funcpipe.model.tensors import is_weightless, named_tensors
from tests.e2e.plans import even_plan

optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.AdamW, lr=0.01)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = torch.relu(self.inner(self.norm(x)))
        result: Tensor = x + self.outer(inner)
        return result


class Model(nn.Module):
    """A language model with a tied head, and positions that are computed when it is made."""

    positions: Tensor

    def __init__(self, blocks: int = 3, width: int = 8, words: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        angles = torch.arange(16.0)[:, None] / 10 ** (torch.arange(width) / width)
        self.register_buffer("positions", torch.sin(angles), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.positions[: ids.shape[1]].to(x.dtype)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


class Dropping(Model):
    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = nn.functional.dropout(super().forward(ids), 0.3, self.training)
        return result


SAMPLE = (torch.zeros(2, 6, dtype=torch.long),)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [tuple(torch.randint(0, 11, (2, 6), generator=generator)) for _ in range(16)]


def write(model: nn.Module, folder: Path, *, files: int = 2, without: str = "?") -> Path:
    """The weights of `model` as a folder of Hugging Face's, in several files with an index."""
    folder.mkdir(exist_ok=True)
    seen: dict[int, str] = {}
    for name, tensor in named_tensors(model).items():
        if without not in name:
            seen.setdefault(id(tensor), name)
    tensors = {name: named_tensors(model)[name].detach().clone() for name in seen.values()}
    names = {f"model-{i}.safetensors": list(tensors)[i::files] for i in range(files)}
    for file, own in names.items():
        save_file({name: tensors[name] for name in own}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, own in names.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def plan(model: nn.Module, **options: Any) -> Any:
    return even_plan(model, SAMPLE, stages=2, replicas=2, micro_batch=2, micro_batches=2, **options)


def trained(model: nn.Module | Callable[[], nn.Module], chosen: Any, *, epochs: int = 2, **options: Any) -> Any:
    pipe = FuncPipe(model, loss_fn=loss, optimizer=optimizer, **options)
    return pipe.train(data(), epochs=epochs, plan=chosen)


def test_a_run_of_weights_in_files_equals_one_of_the_module(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Model()
    folder, chosen = write(model, tmp_path / "weights"), plan(model)
    found = trained(Model, chosen, weights=str(folder))
    expected = trained(model, chosen)
    assert found.losses == expected.losses
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(tensor, expected.tensors[name]) for name, tensor in found.tensors.items())


def test_functions_start_from_what_lies_in_files_and_are_sent_none_of_it(tmp_path: Path) -> None:
    pipe = FuncPipe(Model, loss_fn=loss, optimizer=optimizer, weights=str(write(Model(), tmp_path)))
    assert is_weightless(pipe.model)
    learner = Learner(model=pipe.model, recipe=pipe._recipe, weights=pipe._weights)
    order, settings = SampleOrder(epochs=1), RunSettings()
    job = make_job(learner, data(), plan(Model()), order, settings)
    stages = make_stages(job, RunData.of(job))
    assert [stage.tensors for stage in stages] == [{}, {}]
    assert all(len(stage.bundle) < 60_000 for stage in stages)


def test_layers_are_those_of_the_module_itself(tmp_path: Path) -> None:
    model, _ = open_model(Model, write(Model(), tmp_path))
    expected, found = trace(Model(), SAMPLE), trace(model, SAMPLE)
    assert [layer.name for layer in found.layers] == [layer.name for layer in expected.layers]
    assert found.values == expected.values
    assert found.tied_names == expected.tied_names


@pytest.mark.parametrize("stages", [1, pytest.param(3, marks=pytest.mark.long)])
def test_what_is_in_no_file_begins_alike_under_every_plan(tmp_path: Path, stages: int) -> None:
    folder = str(write(Model(), tmp_path, without="blocks.1.inner"))
    chosen = [plan(Model()), even_plan(Model(), SAMPLE, stages=stages, replicas=1, micro_batch=2, micro_batches=4)]
    one, other = (trained(Model, each, weights=folder, epochs=1) for each in chosen)
    assert all(torch.allclose(tensor, other.tensors[name], atol=1e-6) for name, tensor in one.tensors.items())
    assert one.tensors["blocks.1.inner.weight"].std() > 0.1


def test_weights_in_bf16_stay_so(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Model().to(torch.bfloat16)
    model.positions = Model().positions
    folder, chosen = write(model, tmp_path), plan(model)
    found, expected = trained(Model, chosen, weights=folder, epochs=1), trained(model, chosen, epochs=1)
    assert found.tensors["head.weight"].dtype is torch.bfloat16
    assert found.losses == expected.losses


class FewBits(nn.Module):
    """A layer whose frozen weight lies in 8 or 4 bits, as libraries for quantised models keep it, with an adapter."""

    scale: Tensor

    def __init__(self, inputs: int, outputs: int, bits: int) -> None:
        super().__init__()
        packed = torch.zeros(outputs, inputs * bits // 8, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("scale", torch.full((outputs, 1), 2.0**-bits))
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)
        self.bits = bits

    def forward(self, x: Tensor) -> Tensor:
        low, high = (part.to(x.dtype) for part in (self.weight & 15, self.weight >> 4))
        whole = self.weight.to(x.dtype) if self.bits == 8 else torch.stack([low, high], -1).flatten(1)
        result: Tensor = nn.functional.linear(x, (whole - 2 ** (self.bits - 1)) * self.scale) + self.up(self.down(x))
        return result


class Quantised(Model):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block, bits in zip(self.blocks, (8, 4, 8), strict=True):
            block.inner = FewBits(8, 16, bits)  # type: ignore[union-attr,unused-ignore]


def test_adapters_learn_on_weights_in_8_and_4_bits(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Quantised()
    for module in model.modules():
        if isinstance(module, FewBits):
            module.weight.data = torch.randint(0, 256, module.weight.shape).to(torch.uint8)
    folder, chosen = write(model, tmp_path), plan(model)
    before = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    found, expected = trained(Quantised, chosen, weights=folder, epochs=1), trained(model, chosen, epochs=1)
    assert found.losses == expected.losses
    assert all(torch.equal(tensor, expected.tensors[name]) for name, tensor in found.tensors.items())
    changed = {name.split(".")[-2] for name, tensor in found.tensors.items() if not torch.equal(tensor, before[name])}
    assert changed == {"down", "up"}


def test_dropout_draws_what_it_draws_in_the_module_itself(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Dropping()
    folder, chosen = write(model, tmp_path), plan(model)
    assert trained(Dropping, chosen, weights=folder, epochs=1).losses == trained(model, chosen, epochs=1).losses


def test_a_model_by_its_weights_is_validated_and_evaluated(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Model()
    folder, chosen = write(model, tmp_path), plan(model)
    pipe = FuncPipe(Model, loss_fn=loss, optimizer=optimizer, weights=folder)
    held = FuncPipe(model, loss_fn=loss, optimizer=optimizer)
    found, expected = (each.evaluate(data()[:8], plan=chosen) for each in (pipe, held))
    assert found.loss == expected.loss
    runs = [each.train(data(), plan=chosen, validation=data()[:4]) for each in (pipe, held)]
    assert runs[0].validations == runs[1].validations


class Reading(Model):
    def forward(self, ids: Tensor) -> Tensor:
        x = super().forward(ids)
        return x * 2 if x.sum().item() > 0 else x


class Growing(Model):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))


class Half(Model):
    def __init__(self) -> None:
        super().__init__()
        self.half()


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a narrower model": (lambda: Model(width=4), r"embed.weight has shape \[11, 4\], and \[11, 8\] in .*model-0"),
    "a shallower model": (
        lambda: Model(blocks=2),
        r"Model has no blocks\.2\..* and 2 more, which are in the files of weights; make",
    ),
    "no contents": (Growing, r"scale is in no file of weights, .* without contents"),
    "another dtype": (Half, r"is of torch\.float16, and of torch\.float32 in .*let the function make it of that"),
    "no module": (lambda: "model", r"returns a str, not a torch\.nn\.Module"),  # type: ignore[dict-item, return-value]
    "contents": (lambda: Model(blocks=int(torch.ones(2).sum().item())), r"fails on the meta device"),
}


@pytest.mark.parametrize(("factory", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_weights_do_not_fit_is_refused_by_headers_alone(
    tmp_path: Path, factory: Callable[[], nn.Module], message: str
) -> None:
    folder = write(Model(), tmp_path)
    with pytest.raises(ModelError, match=message):
        FuncPipe(factory, loss_fn=loss, optimizer=optimizer, weights=folder)


@pytest.mark.parametrize("source", ["nothing", "nothing.safetensors", "empty"])
def test_files_that_are_missing_are_named(tmp_path: Path, source: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=f"{source}"):
        FuncPipe(Model, loss_fn=loss, optimizer=optimizer, weights=str(tmp_path / source))


def test_code_that_looks_into_what_follows_from_weights_is_named(tmp_path: Path) -> None:
    pipe = FuncPipe(Reading, loss_fn=loss, optimizer=optimizer, weights=write(Model(), tmp_path))
    with pytest.raises(ModelError, match=r"item\(\) > 0 else x`: .*weights are not here: .* must not depend on values"):
        pipe.train(data(), plan=plan(Model()))


def test_a_module_that_is_made_already_is_refused_beside_weights(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="must be a function that makes the module"):
        FuncPipe(Model(), loss_fn=loss, weights=write(Model(), tmp_path))


@pytest.mark.parametrize("verb", ["verify", "load"])
def test_what_needs_the_weights_here_says_so(tmp_path: Path, verb: str) -> None:
    pipe = FuncPipe(Model, loss_fn=loss, optimizer=optimizer, weights=write(Model(), tmp_path))
    with pytest.raises(ModelError, match=f"{verb} needs the module's weights in this process"):
        pipe.verify(data()) if verb == "verify" else pipe.load("run", storage=tmp_path.as_uri())


@pytest.mark.parametrize("as_url", [True, False])
def test_files_may_be_named_one_by_one(tmp_path: Path, as_url: bool) -> None:
    files = sorted(write(Model(), tmp_path).glob("*.safetensors"))
    found = find_weights([file.as_uri() if as_url else file for file in files])
    assert found.keys() == find_weights(tmp_path.as_uri() if as_url else tmp_path).keys()
    assert found == find_weights(files[0].parent / "model.safetensors.index.json")
    (tmp_path / "copy.safetensors").write_bytes(files[0].read_bytes())
    with pytest.raises(DataError, match="is in two files"):
        find_weights([*files, tmp_path / "copy.safetensors"])


def test_wrappers_of_peft_find_their_weights(tmp_path: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = Model()
            inner.blocks[0].inner = nn.ModuleDict({"base_layer": nn.Linear(8, 16)})
            self.base_model = nn.ModuleDict({"model": inner})

    _, weights = open_model(Wrapped, write(Model(), tmp_path))
    assert weights.stored["base_model.model.blocks.0.inner.base_layer.weight"].shape == (16, 8)
    assert weights.made.keys() == {"base_model.model.positions"}


def test_files_of_this_machine_are_refused_where_functions_run_in_a_cloud(tmp_path: Path) -> None:
    _, weights = open_model(Model, str(write(Model(), tmp_path)))
    weights.check_reachable("local:///socket")
    weights.check_reachable("ray://local")
    with pytest.raises(PlatformRefused, match="lie on this machine"):
        weights.check_reachable("aws-lambda://funcpipe?region=eu-central-1")


def test_one_block_of_each_kind_is_timed_without_weights(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Model()
    given: dict[str, Any] = {"platform": "local", "micro_batch": 2, "repeats": 1, "layers": 100}
    held = FuncPipe(model, loss_fn=loss, optimizer=optimizer).profile(SAMPLE, **given)
    pipe = FuncPipe(Model, loss_fn=loss, optimizer=optimizer, weights=write(model, tmp_path))
    found = pipe.profile(SAMPLE, **given)
    assert is_weightless(pipe.model)
    assert found.timed_as == held.timed_as
    assert found.timed_as["blocks.2.outer"] == "blocks.0.outer"
    assert len(found.timed_as) == 6
    assert all(layer.forward_s[0] > 0 and layer.backward_s[0] > 0 for layer in found.layers[1:])
    assert found.tensors == held.tensors
    sizes = ("name", "parameter_bytes", "constant_bytes", "activation_bytes", "input_bytes")
    assert [[getattr(layer, size) for size in sizes] for layer in found.layers] == [
        [getattr(layer, size) for size in sizes] for layer in held.layers
    ]
    assert pipe.optimize(global_batch=8).stages
    assert from_text(ModelProfile, to_text(found), source="a test") == found


class Scored(Model):
    """The model that computes its own loss."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": loss(super().forward(ids), labels)}


def padded(count: int) -> list[dict[str, Tensor]]:
    """Samples of which every other has as many targets as `count` less."""
    samples = [{"ids": ids, "labels": labels.clone()} for ids, labels in data()]
    for sample in samples[::2]:
        sample["labels"][6 - count :] = -100
    return samples


def whole_sum(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def test_a_loss_that_is_no_mean_over_micro_batches_is_refused_without_weights(tmp_path: Path) -> None:
    folder, chosen = write(Model(), tmp_path), plan(Model())
    with pytest.raises(DataError, match="the loss is a sum over samples, not their mean"):
        FuncPipe(Model, loss_fn=whole_sum, optimizer=optimizer, weights=folder).train(data(), plan=chosen)
    own = FuncPipe(Scored, optimizer=optimizer, weights=folder)
    with pytest.raises(DataError, match=r"some samples have 0 targets that are ignored \(-100\), and others 2"):
        own.train(padded(2), plan=chosen)
    learner = Learner(model=own.model, recipe=own._recipe, weights=own._weights)
    assert make_job(learner, padded(0), chosen, SampleOrder(), RunSettings()).samples == 16
