"""Losses that are means over other things than samples: sums and weights, exact however a batch is cut."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from funcpipe import PlanError
from funcpipe.core import Wire
from funcpipe.neighbours.parameter_server.training import check_servable
from funcpipe.neighbours.parameter_server.worker_group import Updates
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.evaluation import Scores
from funcpipe.training.recipe import recipe_with
from tests.examples import in_long_run
from tests.in_process import prepared_run, run_workers
from tests.jobs.scripts import EQUAL, SGD, Script, job_of, run_over_functions, run_script, worst_difference
from tests.jobs.test_losses import PADDING, Language, Residual, padded, ragged, refusal, sentences, token_mean, vectors


def token_sum(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(output.reshape(-1, 40), target.flatten(), ignore_index=PADDING, reduction="sum")
    return total, (target != PADDING).sum()


def mean_of(found: Any) -> Tensor:
    total, weight = found
    quotient: Tensor = total / weight
    return quotient


def spatial(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PADDING)


class Clipping(torch.optim.SGD):
    """What a script does that clips the gradient before each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


WEIGHTED = {"reduction": "weighted"}
EXACT = {
    "a sum and its weight": Script(
        make=lambda: (Language(), token_sum), samples=partial(sentences, 44), recipe=WEIGHTED
    ),
    "padded by batch": Script(
        make=lambda: (Language(), token_sum), samples=partial(ragged, 44), collate=padded, recipe=WEIGHTED
    ),
    "tokens": Script(
        make=lambda: (Language(), spatial), samples=partial(sentences, 44), recipe={"reduction": "tokens"}
    ),
    "padding alone": Script(
        make=lambda: (Language(), spatial),
        samples=partial(sentences, 32, length=lambda i: 0 if 4 <= i < 12 else 1 + i % 12),
        recipe={"reduction": "tokens"},
    ),
    "weights of classes": Script(
        make=lambda: (
            Residual(),
            nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0, 2.5]), ignore_index=2, label_smoothing=0.1),
        ),
        samples=partial(vectors, 44),
        recipe={"reduction": "tokens"},
    ),
    "clipped": Script(
        make=lambda: (Language(), token_sum),
        samples=partial(sentences, 44),
        optimizer=Clipping,
        recipe=WEIGHTED | {"clip_grad_norm": 0.1},
    ),
    "skips": Script(make=lambda: (Language(), token_sum), samples=sentences, recipe=WEIGHTED | {"on_nan": "skip"}),
}


@pytest.mark.parametrize(
    ("name", "stages", "replicas"), [*((name, 2, 2) for name in EXACT), ("tokens", 1, 1), ("clipped", 3, 1)]
)
def test_a_weighted_loss_equals_a_script_on_whole_batches(name: str, stages: int, replicas: int) -> None:
    script = EXACT[name]
    loss_of = mean_of if script.recipe["reduction"] == "weighted" else (lambda found: found)
    expected = run_script(script, loss_of=loss_of)[0]
    plain = replace(script, optimizer=SGD) if script.optimizer is Clipping else script
    difference, tensor = worst_difference(plain, run_over_functions(plain, stages=stages, replicas=replicas), expected)
    assert difference < EQUAL, tensor


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"vocab_size": 40, "n_positions": 12, "n_embd": 16, "n_layer": 3, "n_head": 2}
    no_dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout))


def next_tokens(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of Hugging Face's language models, as a sum over the labels that are left after the shift."""
    logits, wanted = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, wanted, reduction="sum"), (wanted != PADDING).sum()


@pytest.mark.parametrize(("stages", "replicas"), [(2, 2), *in_long_run([(3, 1)])])
def test_a_language_model_with_padding_equals_a_script_on_whole_batches(stages: int, replicas: int) -> None:
    script = Script(make=lambda: (gpt2(), next_tokens), samples=partial(sentences, 28), recipe=WEIGHTED)
    expected = run_script(script, loss_of=mean_of)[0]
    found = run_over_functions(script, stages=stages, replicas=replicas)
    difference, tensor = worst_difference(script, found, expected)
    assert difference < EQUAL, tensor


class Llama(nn.Module):
    """A language model that knows by positions where a sequence of a row begins."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 12}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False, initializer_range=0.3))

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        return self.model(input_ids=ids, position_ids=positions)


def sequences(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(40, (5 if i % 2 else 7,), generator=generator) for i in range(count)]


def packed(count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Rows of two sequences each."""
    from transformers import DataCollatorWithFlattening

    collator = DataCollatorWithFlattening()  # type: ignore[no-untyped-call]
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    both = [{"input_ids": ids.tolist()} for ids in sequences(2 * count)]
    for i in range(0, len(both), 2):
        row = collator(both[i : i + 2])
        rows.append((row["input_ids"][0], row["position_ids"][0], row["labels"][0]))
    return rows


def test_sequences_in_one_row_are_trained_on_as_if_they_were_alone() -> None:
    script = Script(make=lambda: (Llama(), next_tokens), samples=partial(packed, 28), recipe=WEIGHTED)
    torch.manual_seed(1)
    model = Llama()
    ids, positions, labels = map(torch.stack, zip(*packed(4), strict=True))
    total, tokens = next_tokens(model(ids, positions), labels)
    alone = [next_tokens(model.model(one[None]), one[None]) for one in sequences(8)]
    assert tokens == sum(count for _, count in alone) == 8 * 5
    torch.testing.assert_close(total, torch.stack([own for own, _ in alone]).sum())
    expected = run_script(script, loss_of=mean_of)[0]
    difference, tensor = worst_difference(script, run_over_functions(script, stages=2, replicas=2), expected)
    assert difference < EQUAL, tensor


def test_a_loss_that_returns_what_was_not_declared_is_refused() -> None:
    sums, means = EXACT["a sum and its weight"], EXACT["tokens"]
    assert "give reduction='weighted'" in refusal(replace(sums, recipe={}))
    assert "returns a Tensor, not (sum, weight), as reduction='weighted' says" in refusal(
        replace(means, recipe=WEIGHTED)
    )
    assert "not one number; with reduction='tokens'" in refusal(replace(sums, recipe={"reduction": "tokens"}))
    negative = replace(sums, make=lambda: (Language(), lambda o, t: (o.sum(), -1)))
    assert "the weight -1.0; it must be" in refusal(negative)
    pairs = [(x, x) for x, _ in vectors()]
    values = replace(means, make=lambda: (Residual(1), lambda o, t: o.sum()), samples=lambda: pairs)
    assert "the target must be a tensor of class indices" in refusal(values)


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [
        (lambda o, t: (token_mean(o, t), 1), "weighted"),
        (lambda o, t: (token_mean(o, t) * len(t), len(t)), "weighted"),
        (lambda o, t: F.cross_entropy(o[:, :-1].flatten(0, 1), t[:, 1:].flatten()), "tokens"),
    ],
)
def test_sums_that_do_not_add_up_are_refused(loss: Any, reduction: str) -> None:
    script = Script(make=lambda: (Language(), loss), samples=sentences, recipe={"reduction": reduction})
    assert f"divided by the sum of their weights, as reduction={reduction!r} says" in refusal(script)


@pytest.mark.parametrize(("replicas", "name"), [(1, "tokens"), (2, "a sum and its weight")])
def test_reported_losses_are_those_of_whole_batches(replicas: int, name: str) -> None:
    script = EXACT[name]
    model, loss = script.made()
    ids, labels = default_collate(script.samples()[:16])
    expected = loss(model(ids), labels)
    expected = mean_of(expected) if isinstance(expected, tuple) else expected
    job = job_of(replace(script, samples=partial(sentences, 16)), replicas=replicas)
    workers = run_workers(job, MemoryStorage()).values()
    passes = [worker.computation.passes for worker in workers if worker.computation.passes.samples]
    assert len(passes) == replicas
    reported = sum(one.loss_sum for one in passes) / sum(one.samples for one in passes)
    assert reported == pytest.approx(expected.item(), rel=1e-6)


def test_a_weighted_loss_is_scaled_where_gradients_travel_in_fp16() -> None:
    script = EXACT["a sum and its weight"]
    job = job_of(script, replicas=2)
    job = replace(job, plan=replace(job.plan, wire=Wire.FP16))
    states = [worker.computation.state().state_dict() for worker in run_workers(job, MemoryStorage()).values()]
    found = {name: tensor for state in states for name, tensor in state.items()}
    difference, tensor = worst_difference(script, found, run_script(script, loss_of=mean_of)[0])
    assert difference < 5e-3, tensor


def test_a_validation_weighs_its_micro_batches() -> None:
    recipe = recipe_with(token_sum, SGD, {"reduction": "weighted"})
    scores, model = Scores(recipe.cast_loss, {}), Language()
    rows = sentences(12)
    for first in range(0, 12, 4):
        ids, labels = default_collate(rows[first : first + 4])
        scores.add(model(ids), labels, 4)
    ids, labels = default_collate(rows)
    found = scores.values([scores.part()], loss="loss")[1]["loss"]
    assert found == pytest.approx(token_mean(model(ids), labels).item())


def test_a_step_without_any_weight_ends_the_run() -> None:
    script = replace(EXACT["tokens"], samples=partial(sentences, length=lambda i: 4 if i < 16 else 0))
    with pytest.raises(Exception, match="add up to 0"):
        run_over_functions(script)


def test_plans_that_update_before_the_weight_is_known_are_refused() -> None:
    job = job_of(EXACT["tokens"], replicas=2)
    sharded = replace(job, plan=replace(job.plan, shard_optimizer=True))
    with pytest.raises(PlanError, match="the weight of a loss with a reduction"):
        prepared_run(sharded, MemoryStorage())
    with pytest.raises(PlanError, match="does not learn the weights of losses"):
        check_servable(job, Updates.BSP)
