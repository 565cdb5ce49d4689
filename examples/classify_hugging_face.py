"""Train a Hugging Face classifier until its accuracy on held-out text no longer grows.

    pip install transformers torchmetrics
    python classify_hugging_face.py

Model, optimiser and scheduler are made as for `transformers.Trainer`, whose arguments are named beside what stands
for them here. Samples are what the model is called with, `labels` among them. A small BERT with fresh weights learns
to tell Python's documentation from its code, byte by byte, so that the example runs without a download.
"""

import argparse
import inspect
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from transformers import BertConfig, BertForSequenceClassification, get_scheduler

from funcpipe import FuncPipe, Validation

BLOCK, SAMPLES, EPOCHS, BATCH = 32, 512, 8, 64


def samples(*, held_out: bool) -> list[dict[str, torch.Tensor]]:
    """Blocks of bytes; label 0 is documentation, label 1 is code. Every fourth is held out."""
    texts = "".join(topics.values()), inspect.getsource(argparse) + inspect.getsource(inspect)
    found = []
    for number in range(SAMPLES):
        if (number // 2 % 4 == 0) == held_out:
            label, start = number % 2, number // 2 * BLOCK * 8
            ids = torch.tensor(list(texts[label].encode()[start : start + BLOCK]))
            found.append({"input_ids": ids, "labels": torch.tensor(label)})
    return found


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, which lets biases and norms decay no more than Trainer does."""
    plain = [p for name, p in model.named_parameters() if "bias" in name or "LayerNorm" in name]
    others = [p for name, p in model.named_parameters() if not ("bias" in name or "LayerNorm" in name)]
    groups = [{"params": others, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)  # learning_rate, weight_decay


def main() -> None:
    """Validate after every epoch, and end after two validations that are no better."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=256,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=BLOCK,
        num_labels=2,
    )
    model = BertForSequenceClassification(config)
    train_data = DataLoader(samples(held_out=False), batch_size=BATCH, shuffle=True)  # per_device_train_batch_size
    optimizer = optimizer_of(model)
    steps = EPOCHS * len(train_data)
    pipe = FuncPipe(
        model,
        optimizer=optimizer,
        scheduler=get_scheduler("linear", optimizer, num_warmup_steps=4, num_training_steps=steps),  # lr_scheduler_type
        scheduler_interval="step",
        clip_grad_norm=1.0,  # max_grad_norm
    )
    validation = Validation(  # eval_strategy="epoch", metric_for_best_model, EarlyStoppingCallback
        data=samples(held_out=True),
        metrics={"accuracy": MulticlassAccuracy(2, average="micro")},
        monitor="accuracy",
        mode="max",
        patience=2,
        min_delta=0.01,
    )
    result = pipe.fit(train_data, epochs=EPOCHS, micro_batch=BATCH // 2, validation=validation)  # num_train_epochs
    model.load_state_dict(result.best_state_dict())  # load_best_model_at_end
    found = [report.values["accuracy"] for report in result.validations]
    print(f"accuracy after each epoch: {', '.join(f'{value:.2f}' for value in found)}")
    print(f"the best after {result.best_step} of {len(result.losses)} steps; {EPOCHS} epochs were allowed")


if __name__ == "__main__":
    main()
