"""All names of a parameter or buffer are one tensor: in what stages save, in results, and when they are loaded."""

import contextlib
import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe import FuncPipe
from funcpipe.client.prepare.session import Session, Site, session_on
from funcpipe.errors import ModelError
from funcpipe.model.graph import LayerGraph, trace
from funcpipe.model.split import StageModule, dump_stage, load_stage, split
from funcpipe.model.tensors import load_tensors, named_tensors, saved_state
from funcpipe.platforms.catalog import load_spec
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform, one_at_a_time
from funcpipe.training.norms import GradientNorm
from funcpipe.training.state import StageState, capture_state, merge_stages, restore_state, select_for_stage
from tests.e2e.plans import even_plan
from tests.e2e.reference import largest_difference
from tests.in_process import train_both
from tests.model.split.chain import even_bounds

adam = partial(torch.optim.Adam, lr=0.05)


class UnusedHead(nn.Module):
    """A head that shares the embedding's weight and that the forward does not call."""

    def __init__(self, *, head_first: bool, frozen: bool = False) -> None:
        super().__init__()
        if head_first:
            self.head = nn.Linear(5, 7, bias=False)
        self.embed = nn.Embedding(7, 5)
        self.body = nn.Linear(5, 5)
        self.last = nn.Linear(5, 7)
        if not head_first:
            self.head = nn.Linear(5, 7)
        self.head.weight = self.embed.weight
        self.body.requires_grad_(not frozen)

    def forward(self, ids: Tensor) -> Any:
        return self.last(torch.tanh(self.body(self.embed(ids))))


def tokens() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 7, (8, 3), generator=generator)
    return [(row, row.roll(1)) for row in ids]


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("head_first", [True, False])
def test_a_name_that_the_forward_does_not_read_is_trained_too(head_first: bool) -> None:
    torch.manual_seed(0)
    model = UnusedHead(head_first=head_first)
    plan = even_plan(
        model, (torch.zeros(2, 3, dtype=torch.long),), stages=2, replicas=1, micro_batch=2, micro_batches=2
    )
    workers, expected = train_both(model, plan, tokens, loss=token_loss, optimizer=adam, epochs=1)
    merged = merge_stages([worker.computation.state() for worker in workers.values()])
    found = merged.state_dict()
    assert set(named_tensors(model)) - set(found) == (set() if head_first else {"head.bias"})
    assert torch.equal(found["head.weight"], found["embed.weight"])
    load_tensors(model, found)
    assert largest_difference(named_tensors(model), named_tensors(expected)) < 1e-5
    assert model.head.weight is model.embed.weight
    again = copy.deepcopy(model)
    again.load_state_dict(saved_state(model))
    assert largest_difference(named_tensors(again), named_tensors(expected)) < 1e-5
    (whole,) = split(trace(UnusedHead(head_first=head_first), (torch.zeros(2, 3, dtype=torch.long),)), [(0, 3)])
    restore_state(select_for_stage(merged, whole), whole, adam(whole.parameters()), GradientNorm())
    assert all(torch.equal(tensor, found[name]) for name, tensor in named_tensors(whole).items())


def states_after_a_change(graph: LayerGraph, stages: int) -> list[StageState]:
    """What stages in other processes save that have added 1 to each parameter."""
    states = []
    for stage in split(graph, even_bounds(len(graph.layers), stages)):
        other: StageModule = load_stage(*_copied(stage))[0]
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(1)
        states.append(capture_state(other, None, GradientNorm()))
    return states


def _copied(stage: StageModule) -> tuple[bytes, dict[str, Tensor]]:
    bundle, tensors = dump_stage(stage, None)
    return bundle, {name: tensor.clone() for name, tensor in tensors.items()}


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    ids = torch.randint(1, 20, (2, 5))
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}


def bart() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    sizes = {
        f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("attention_heads", 2))
    }
    config = transformers.BartConfig(
        vocab_size=20, d_model=8, encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=12, **sizes
    )
    ids = torch.randint(3, 20, (2, 5))
    return transformers.BartForConditionalGeneration(config), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    ("make", "stages"), [(t5, 1), (t5, 3), (bart, 3), pytest.param(bart, 1, marks=pytest.mark.long)]
)
def test_every_name_of_an_encoder_decoder_has_its_trained_value(make: Any, stages: int) -> None:
    model, inputs = make()
    graph = trace(model, (), inputs)
    merged = merge_stages(states_after_a_change(graph, stages)).state_dict()
    expected = {name: tensor + 1 if tensor.requires_grad else tensor for name, tensor in named_tensors(model).items()}
    assert set(model.state_dict()) - set(merged) <= {"final_logits_bias"}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in merged.items())
    load_tensors(model, merged)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in named_tensors(model).items())


class View(nn.Module):
    def __init__(self, *, overlap: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 2, bias=False)
        both = torch.randn(6, 4)
        self.embed.weight = nn.Parameter(both[:4])
        self.head.weight = nn.Parameter(both[2:4] if overlap else both[4:])

    def forward(self, x: Tensor) -> Any:
        return self.head(self.embed(x))


def test_different_tensors_in_the_same_memory_are_refused_unless_they_do_not_overlap() -> None:
    x = torch.randn(2, 4)
    with pytest.raises(ModelError, match=r"embed\.weight and head\.weight are two tensors in the same memory"):
        trace(View(overlap=True), (x,))
    assert len(trace(View(overlap=False), (x,)).layers) == 2
    columns = torch.randn(4, 8)
    model = View(overlap=False)
    model.embed.weight, model.head.weight = nn.Parameter(columns[:, ::2]), nn.Parameter(columns[:2, 1::2])
    assert len(trace(model, (x,)).layers) == 2
    model.head.weight = nn.Parameter(columns[:2, ::2])
    with pytest.raises(ModelError, match="the same memory"):
        trace(model, (x,))


class SharedStatistics(nn.Module):
    def __init__(self, *, same_module: bool) -> None:
        super().__init__()
        self.one = nn.BatchNorm1d(4)
        self.middle = nn.Linear(4, 4)
        self.two = self.one if same_module else nn.BatchNorm1d(4)
        self.two.running_mean = self.one.running_mean

    def forward(self, x: Tensor) -> Any:
        return self.two(self.middle(self.one(x)))


def test_running_statistics_that_two_modules_hold_are_refused_and_a_shared_module_is_one_layer() -> None:
    x = torch.randn(4, 4)
    with pytest.raises(ModelError, match=r"changes the buffer one\.running_mean, which is two\.running_mean too"):
        trace(SharedStatistics(same_module=False), (x,))
    graph = trace(SharedStatistics(same_module=True), (x,))
    (state,) = states_after_a_change(graph, 1)
    assert set(state.state_dict()) == set(named_tensors(SharedStatistics(same_module=True)))


def _rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}gain"] = state.pop(f"{prefix}scale")


class Custom(nn.Module):
    """Keeps its weight in the state_dict under another name, and something that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.ones(4))
        self.register_state_dict_post_hook(_rename)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *others: Any) -> None:
        if f"{prefix}gain" in state:
            state[f"{prefix}scale"] = state.pop(f"{prefix}gain")
        super()._load_from_state_dict(state, prefix, *others)

    def get_extra_state(self) -> Any:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 3}

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * self.scale


def test_a_result_is_in_the_form_of_the_models_own_state_dict() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Custom(), nn.Linear(4, 2))
    graph = trace(model, (torch.randn(2, 4),))
    merged = merge_stages(states_after_a_change(graph, 2)).state_dict()
    assert merged.keys() == named_tensors(model).keys()
    load_tensors(model, merged)
    state = saved_state(model)
    assert state.keys() == model.state_dict().keys()
    assert torch.equal(state["1.gain"], torch.full((4,), 2.0))
    other = nn.Sequential(nn.Linear(4, 4), Custom(), nn.Linear(4, 2))
    other.load_state_dict(state)
    x = torch.randn(3, 4)
    assert torch.equal(other(x), model(x))


@pytest.fixture
def functions_are_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Functions of the local platform are threads of this process."""
    storage = MemoryStorage()
    functions = ThreadPlatform(load_spec("local"), storage)

    @contextlib.contextmanager
    def opened(*_: object, **__: object) -> Iterator[Session]:
        yield session_on(Site(functions, storage, "memory://"), reopen=functions.open)

    monkeypatch.setattr("funcpipe.api.training.open_session", opened)
    with one_at_a_time():
        yield
    functions.stop_all()


@pytest.mark.usefixtures("functions_are_threads")
def test_train_and_verify_take_a_model_with_its_own_state_dict_and_unused_names() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = UnusedHead(head_first=False)
            self.custom = nn.Sequential(nn.Linear(7, 4), Custom(), nn.Linear(4, 7))

        def forward(self, ids: Tensor) -> Any:
            return self.custom(self.words(ids))

    torch.manual_seed(0)
    model = Both()
    plan = even_plan(
        model, (torch.zeros(2, 3, dtype=torch.long),), stages=2, replicas=1, micro_batch=2, micro_batches=2
    )
    pipe = FuncPipe(model, loss_fn=token_loss, optimizer=adam)
    before = saved_state(model)
    assert pipe.verify(tokens(), plan=plan, steps=2).agrees
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items() if isinstance(t, Tensor))
    result = pipe.train(tokens(), plan=plan)
    state = result.state_dict()
    assert torch.equal(state["words.head.weight"], state["words.embed.weight"])
    assert not torch.equal(state["words.head.weight"], before["words.head.weight"])
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items() if isinstance(t, Tensor))
