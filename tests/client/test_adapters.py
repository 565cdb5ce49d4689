"""A base model with adapters merged into it a layer at a time equals what peft merges in memory."""

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import default_collate

import funcpipe
from funcpipe.api import FuncPipe
from funcpipe.cli import main
from funcpipe.client.follow.adapters import merge_adapters
from funcpipe.client.follow.launch import launch
from funcpipe.client.follow.results import RunResult, ignore_progress
from funcpipe.client.prepare.job import Learner, SampleOrder, make_job
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import Plan, RunSettings, ScheduleKind, Sync, Wire
from funcpipe.errors import ModelError
from funcpipe.model.graph import trace
from funcpipe.model.tensors import named_tensors
from funcpipe.platforms.catalog import load_spec, open_storage
from funcpipe.testing.thread_platform import ThreadPlatform
from funcpipe.training.state_dict import StateDict
from tests.client.threads import STEADY
from tests.support.plans import even_stages

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning",  # of what peft uses of transformers
    "ignore::UserWarning:peft",
)
LAYERS = ["q_proj", "v_proj"]


def config(**options: Any) -> Any:
    from transformers import LlamaConfig

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaConfig(vocab_size=32, use_cache=False, **sizes, **heads, **options)


def adapted(adapter: Any, **options: Any) -> Any:
    from peft import get_peft_model
    from transformers import LlamaForCausalLM

    return get_peft_model(LlamaForCausalLM(config(**options)), adapter)


def drawn(model: Any) -> Any:
    """The model with adapters that do something: some begin as zeros."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter))
    return model


def read_later(state: dict[str, Tensor], names: list[str]) -> StateDict:
    """The `state` whose names are kept when they are read."""

    def read(name: str) -> Tensor:
        names.append(name)
        return state[name].clone()

    return StateDict({name: partial(read, name) for name in state})


def lora(**options: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": LAYERS, **options})


ADAPTERS: dict[str, tuple[dict[str, Any], dict[str, Any], torch.dtype]] = {
    "plain": ({}, {}, torch.float32),
    "magnitudes": ({"use_dora": True}, {}, torch.float32),
    "biases": ({"use_rslora": True, "bias": "lora_only"}, {"attention_bias": True}, torch.float32),
    "a_head_of_its_own": ({"modules_to_save": ["lm_head"]}, {"tie_word_embeddings": True}, torch.float32),
    "a_tied_embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, {"tie_word_embeddings": True}, torch.float32),
    "all_layers_in_bf16": ({"target_modules": "all-linear"}, {}, torch.bfloat16),
    "some_tokens": ({"trainable_token_indices": {"embed_tokens": [1, 5]}}, {}, torch.float32),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_it_equals_what_peft_merges(kind: str) -> None:
    settings, options, dtype = ADAPTERS[kind]

    def make() -> Any:
        return adapted(lora(**settings), **options).to(dtype)

    model = drawn(make())
    state, names = {name: tensor.clone() for name, tensor in model.state_dict().items()}, list[str]()
    with torch.device("meta"):
        found = merge_adapters(make(), read_later(state, names))
    assert names == [], "nothing is read before it is asked for"
    expected = model.merge_and_unload().state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name])
        assert tensor.dtype is expected[name].dtype
        layer = name.rpartition(".")[0]
        assert all(layer in read or "embed_tokens" in read for read in names), (
            "a layer at a time, or what it is tied to"
        )
        names.clear()


MODULE = """
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

def make():
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("llama"))
    return get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
"""


class Threads(ThreadPlatform):
    """Functions that are threads, and can read the files of this machine."""

    url = "local://threads"


def trained(make: Callable[[], nn.Module], storage: str) -> RunResult:
    """What functions that are threads, which need not import transformers and peft, learn."""
    pipe = FuncPipe(make, weights="llama", optimizer=partial(torch.optim.AdamW, lr=0.1))
    learner = Learner(model=pipe.model, recipe=pipe._recipe, weights=pipe._weights)
    data = [{"input_ids": row, "labels": row} for row in torch.arange(64).view(8, 8) % 32]
    layers = [layer.name for layer in trace(pipe.model, (), default_collate(data[:2])).layers]
    plan = Plan(
        global_batch=4,
        micro_batch=2,
        replicas=1,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        platform="local",
        stages=even_stages(layers, 2),
    )
    job = make_job(learner, data, plan, SampleOrder(epochs=2), RunSettings())
    opened = open_storage(storage)
    platform = Threads(load_spec("local"), opened)
    session = replace(session_on(Site(platform, opened, storage), reopen=platform.open), lasts=True)
    try:
        return launch(prepare(job, session, faults=STEADY, settings=RunSettings(name="adapted")), ignore_progress)
    finally:
        platform.stop_all()


def test_what_a_run_learned_is_an_adapter_and_a_model_for_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    torch.manual_seed(0)
    LlamaForCausalLM(config()).save_pretrained("llama")
    Path("trained_by_peft.py").write_text(MODULE)
    make = importlib.import_module("trained_by_peft").make
    storage = (tmp_path / "runs").as_uri()
    state = trained(make, storage).state_dict()
    with torch.device("meta"):
        model = make()
    learned = {name: state[name] for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.save_pretrained("adapter", state_dict=learned)
    own = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained("llama"), "adapter")
    assert_same(own.state_dict(), state)
    assert any(tensor.any() for name, tensor in learned.items() if "lora_B" in name), "it learned something"

    expected = own.merge_and_unload()
    assert_same(funcpipe.export("adapted", storage=storage, merged=model), expected.state_dict())
    with pytest.raises(ModelError, match=r"run adapted trained another model: .*v_proj"):
        funcpipe.export("adapted", storage=storage, merged=adapted(lora(target_modules=["q_proj"])))
    command = ["run", "export", "adapted", "--storage", storage, "--merged", "trained_by_peft:make", "-o"]
    assert main([*command, "merged"]) == 0
    assert main([*command, "merged.safetensors"]) == 0
    assert_same(load_file("merged.safetensors"), expected.state_dict())
    expected.config.save_pretrained("merged")
    assert_same(LlamaForCausalLM.from_pretrained("merged").state_dict(), expected.state_dict())
    assert main([*command, "both", "--optimizer"]) == 2
    assert "give one of them" in capsys.readouterr().err


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_what_cannot_be_merged_is_refused() -> None:
    from peft import PromptTuningConfig, VeraConfig

    with torch.device("meta"):
        for other in (nn.Linear(2, 2), adapted(PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))):
            with pytest.raises(ModelError, match="no adapters that can be merged"):
                merge_adapters(other, {})
        both = adapted(lora(target_modules=["embed_tokens", "lm_head"]), tie_word_embeddings=True)
        with pytest.raises(ModelError, match=r"is the same tensor as .*cannot be merged layer by layer"):
            merge_adapters(both, named_tensors(both))
    shared = VeraConfig(target_modules=LAYERS, r=2, save_projection=False)
    whole = named_tensors(adapted(shared))
    with torch.device("meta"):
        found = merge_adapters(adapted(shared), whole)
    with pytest.raises(ModelError, match=r"q_proj cannot be merged layer by layer .*meta"):
        found["model.layers.0.self_attn.q_proj.weight"]
    broken = drawn(adapted(lora()))
    state = {name: tensor / 0 for name, tensor in named_tensors(broken).items()}
    with pytest.raises(ModelError, match=r"cannot be merged layer by layer .*NaNs"):
        merge_adapters(broken, state)["model.layers.0.self_attn.q_proj.weight"]


def test_without_peft_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match="pip install peft"):
        merge_adapters(nn.Linear(2, 2), {})
