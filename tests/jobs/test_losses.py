"""Losses of a batch that are not the mean of its micro-batches' losses: refused, or averaged as asked."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from funcpipe import DataError
from funcpipe.client.follow.launch import _record
from funcpipe.runstate.keys import Keys
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.losses import loss_of_output
from tests.in_process import prepared_run
from tests.jobs.scripts import EQUAL, Script, job_of, run_over_functions, run_script, worst_difference
from tests.support.run_keys import NONCE

PADDING = -100


class Residual(nn.Module):
    """Blocks one after the other, each added to its input, and a head."""

    def __init__(self, head: int = 3, norm: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), norm(), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(24, head)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        output: Tensor = self.head(x)
        return output


class Then(Residual):
    """The same, with something made of its output and its input."""

    def __init__(self, then: Callable[[Tensor, Tensor], Any], *, head: int = 3, **settings: Any) -> None:
        super().__init__(head=head, **settings)
        self.then = then

    def forward(self, x: Tensor) -> Any:
        return self.then(super().forward(x), x)


class Language(nn.Module):
    """Logits for each token; without weights in its head, all losses are alike at first."""

    def __init__(self, *, zero: bool = False, flat: bool = False) -> None:
        super().__init__()
        self.embed, self.body, self.flat = nn.Embedding(40, 24), Residual(head=40), flat
        if zero:
            nn.init.zeros_(self.body.head.weight)
            nn.init.zeros_(self.body.head.bias)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.body(self.embed(ids))
        return logits.flatten(0, 1) if self.flat else logits


class WithLoss(nn.Module):
    """A model that computes its own loss, the mean over tokens that are no padding."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.language, self.drop = Language(**settings), nn.Dropout(0.5)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.language(ids)
        return {"loss": token_mean(logits, labels), "logits": self.drop(logits)}


def vectors(samples: int = 48) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(24, generator=generator), torch.tensor(i * i % 3)) for i in range(samples)]


def rare(samples: int = 48) -> list[tuple[Tensor, Tensor]]:
    """Two classes one after the other, the second one for the last eighth."""
    return [(x, torch.tensor(int(i >= samples - samples // 8))) for i, (x, _) in enumerate(vectors(samples))]


def sentences(samples: int = 48, *, full: int = 0, length: Callable[[int], int] | None = None) -> list[Any]:
    """Tokens and labels, of which the rest is padding; the first `full` have none."""
    generator, rows = torch.Generator().manual_seed(2), []
    for i in range(samples):
        ids = torch.randint(3, 40, (12,), generator=generator)
        labels = ids.clone()
        labels[12 if i < full else (length or (lambda i: 2 + (i * i) % 10))(i) :] = PADDING
        rows.append((ids, labels))
    return rows


def ragged(samples: int = 48) -> list[Any]:
    return [(ids[: 3 + i % 7], labels[: 3 + i % 7]) for i, (ids, labels) in enumerate(sentences(samples, full=samples))]


def padded(rows: list[Any]) -> tuple[Tensor, Tensor]:
    ids, labels = zip(*rows, strict=True)
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    return pad(list(ids)), pad(list(labels), padding_value=PADDING)


def by_name(rows: list[Any]) -> dict[str, Tensor]:
    return dict(zip(("ids", "labels"), padded(rows), strict=True))


def token_mean(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.reshape(-1, 40), target.flatten(), ignore_index=PADDING)


def contrast(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    a, b = (F.normalize(side, dim=1) for side in output)
    return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(a)))


def correlation(output: Tensor, target: Tensor) -> Tensor:
    """Barlow Twins, of the output and its inverse."""
    z = (output - output.mean(0)) / output.std(0)
    return (z.T @ z / len(z) - torch.eye(z.size(1))).square().sum()


def ranking(output: Tensor, target: Tensor) -> Tensor:
    scores = output[:, 0]
    pairs = target[:, None] > target[None]
    return (F.softplus(scores[None] - scores[:, None]) * pairs).sum() / pairs.sum().clamp(min=1)


def dice(output: Tensor, target: Tensor) -> Tensor:
    chosen, wanted = output.softmax(1)[:, 1], (target == 1).float()
    return 1 - 2 * (chosen * wanted).sum() / (chosen.sum() + wanted.sum())


def balanced(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target) + 0.01 * output[1]


def balance(logits: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    shares = logits.softmax(1).mean(0)
    return logits, (shares * shares).sum()


def similarities(logits: Tensor, x: Tensor) -> Tensor:
    return F.normalize(logits, dim=1) @ F.normalize(logits, dim=1).T


COUPLED = {
    "contrast": Script(make=lambda: (Then(lambda y, x: (y, x[:, :3])), contrast), samples=vectors),
    "a matrix of all with all": Script(
        make=lambda: (Then(similarities), lambda s, t: F.cross_entropy(s / 0.2, torch.arange(len(s)))), samples=vectors
    ),
    "correlation": Script(make=lambda: (Residual(), correlation), samples=vectors),
    "ranking": Script(make=lambda: (Residual(), ranking), samples=vectors),
    "dice": Script(make=lambda: (Residual(), dice), samples=vectors),
    "balance in the loss": Script(make=lambda: (Residual(), lambda o, t: balanced(balance(o, o), t)), samples=vectors),
    "balance in the model": Script(make=lambda: (Then(balance), balanced), samples=vectors),
    "tokens": Script(make=lambda: (Language(), token_mean), samples=sentences),
    "tokens, no weights": Script(make=lambda: (Language(zero=True), token_mean), samples=sentences),
    "tokens, late": Script(make=lambda: (Language(), token_mean), samples=partial(sentences, full=32)),
    "tokens, flat": Script(make=lambda: (Language(flat=True), token_mean), samples=sentences),
    "tokens, padded": Script(make=lambda: (Language(), token_mean), samples=ragged, collate=padded),
    "tokens, padded, one by one": Script(
        make=lambda: (Language(), token_mean), samples=ragged, collate=padded, micro_batch=1
    ),
    "own loss": Script(make=lambda: (WithLoss(), loss_of_output), samples=sentences, collate=by_name),
    "own loss, late": Script(
        make=lambda: (WithLoss(), loss_of_output), samples=partial(sentences, full=40), collate=by_name
    ),
    "own loss, padded": Script(make=lambda: (WithLoss(), loss_of_output), samples=ragged, collate=by_name),
    "own loss, no weights": Script(
        make=lambda: (WithLoss(zero=True), loss_of_output), samples=sentences, collate=by_name
    ),
    "class weights": Script(
        make=lambda: (Residual(), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]))), samples=vectors
    ),
    "weights of a rare class": Script(
        make=lambda: (Residual(), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0, 1.0]))), samples=rare
    ),
    "a target of several": Script(
        make=lambda: (
            Residual(),
            lambda o, t: (F.cross_entropy(o, t["of"][0], reduction="none") * t["w"]).sum() / t["w"].sum(),
        ),
        samples=lambda: [(x, {"of": [y], "w": 1.0 + y * 0.5}) for x, y in vectors()],
    ),
    "the largest only": Script(
        make=lambda: (Residual(), lambda o, t: F.cross_entropy(o, t, reduction="none").topk(2).values.mean()),
        samples=vectors,
    ),
}


def test_losses_of_a_batch_that_are_not_the_mean_of_its_parts_are_refused() -> None:
    ways_out = ("coupled='accumulate'", "one micro-batch per global batch (micro_batch=16, replicas=1)")
    for name, script in COUPLED.items():
        said = refusal(script)
        assert "is not the mean of its micro-batches' losses" in said, name
        assert all(way_out in said for way_out in ways_out), name


def refusal(script: Script, *, stages: int = 2) -> str:
    """Why the job is refused; empty if it is not."""
    try:
        job_of(script, stages=stages)
    except DataError as error:
        return str(error)
    return ""


def test_a_sum_over_samples_is_refused() -> None:
    loss = partial(F.cross_entropy, reduction="sum")
    with pytest.raises(
        DataError, match=r"a sum over samples, not their mean: [0-9.]* for \d+ samples.*; it must return"
    ):
        job_of(Script(make=lambda: (Residual(), loss), samples=vectors))


def test_one_micro_batch_per_global_batch_equals_a_script() -> None:
    script = replace(COUPLED["contrast"], micro_batch=16)
    difference, name = worst_difference(script, run_over_functions(script), run_script(script)[0])
    assert difference < EQUAL, name


@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (3, 2)])
def test_coupled_losses_are_averaged_as_gradient_accumulation_does_it(stages: int, replicas: int) -> None:
    script = replace(COUPLED["contrast"], recipe={"coupled": "accumulate"})
    expected, loss = script.made()
    optimizer = script.optimizer(expected.parameters())
    for first in range(0, 48, 4):
        micro_batch = default_collate(script.samples()[first : first + 4])
        torch.autograd.backward(loss(expected(micro_batch[0]), micro_batch[1]) / 4)
        if first % 16 == 12:
            optimizer.step()
            optimizer.zero_grad()
    found = run_over_functions(script, stages=stages, replicas=replicas)
    difference, name = worst_difference(script, found, expected)
    assert difference < EQUAL, name


def test_a_run_says_that_its_losses_are_averaged() -> None:
    job = job_of(replace(COUPLED["contrast"], recipe={"coupled": "accumulate"}))
    storage = MemoryStorage()
    record = _record(prepared_run(job, storage), Keys("run-1", 0, NONCE))
    assert record.loss_over == "micro-batches, as in gradient accumulation"


def several(rows: list[Any]) -> Any:
    """A target that is a list of one dictionary for each sample, and says how many there are."""
    return torch.stack([x for x, _ in rows]), ([{"class": y} for _, y in rows], len(rows))


def of_lists(output: list[Tensor], target: Any) -> Tensor:
    pairs = zip(output, target[0], strict=True)
    return torch.stack([F.cross_entropy(o, t["class"]) for o, t in pairs]).mean()


def temporal(rows: list[Any]) -> tuple[Tensor, Tensor]:
    """The batch as the second dimension."""
    return torch.stack([x for x, _ in rows]), torch.stack([y.expand(2) for _, y in rows], 1)


MEANS = {
    "a mean": Script(make=lambda: (Residual(norm=lambda: nn.BatchNorm1d(24)), F.cross_entropy), samples=vectors),
    "one by one": Script(make=lambda: (Residual(), F.cross_entropy), samples=vectors, micro_batch=1),
    "two by two": Script(make=lambda: (Residual(), F.cross_entropy), samples=vectors, micro_batch=2),
    "all tokens": Script(make=lambda: (Language(), token_mean), samples=partial(sentences, full=48)),
    "all tokens, flat": Script(make=lambda: (Language(flat=True), token_mean), samples=partial(sentences, full=48)),
    "own loss of all tokens": Script(
        make=lambda: (WithLoss(), loss_of_output), samples=partial(sentences, full=48), collate=by_name
    ),
    "draws": Script(make=lambda: (Residual(), lambda o, t: F.cross_entropy(F.dropout(o, 0.5), t)), samples=vectors),
    "zero": Script(make=lambda: (Residual(), lambda o, t: o.sum() * 0), samples=vectors),
    "in place": Script(make=lambda: (Residual(), lambda o, t: F.cross_entropy(o.mul_(2), t)), samples=vectors),
    "a temperature": Script(
        make=lambda: (Then(lambda y, x: (y, torch.ones(3))), lambda o, t: F.cross_entropy(o[0] * o[1], t)),
        samples=vectors,
    ),
    "a mean in the model": Script(make=lambda: (Then(lambda y, x: (y, y.square().mean())), balanced), samples=vectors),
    "second dimension": Script(
        make=lambda: (
            Then(lambda y, x: torch.stack((y, 2 * y))),
            lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()),
        ),
        samples=vectors,
        collate=temporal,
    ),
    "one size only": Script(make=lambda: (Then(lambda y, x: y.view(4, 3)), F.cross_entropy), samples=vectors),
    "lists": Script(make=lambda: (Then(lambda y, x: list(y)), of_lists), samples=vectors, collate=several),
    "so few samples": Script(make=lambda: (Residual(), F.cross_entropy), samples=partial(vectors, 21)),
}


def test_means_over_samples_are_not_refused() -> None:
    assert {name: said for name, script in MEANS.items() if (said := refusal(script, stages=1))} == {}
