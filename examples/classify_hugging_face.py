"""Train a Hugging Face classifier until its accuracy on held-out text no longer grows.

    pip install transformers torchmetrics
    python classify_hugging_face.py

Samples are what the model is called with, `labels` among them. A small BERT with fresh weights learns to tell Python's
documentation from its code, byte by byte, so that the example runs without a download.
"""

import argparse
import inspect
from functools import partial
from pydoc_data.topics import topics

import torch
from torchmetrics.classification import MulticlassAccuracy
from transformers import BertConfig, BertForSequenceClassification

from funcpipe import FuncPipe, Validation

BLOCK, SAMPLES, EPOCHS, GLOBAL_BATCH, MICRO_BATCH = 32, 512, 8, 64, 32


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
    pipe = FuncPipe(BertForSequenceClassification(config), optimizer=partial(torch.optim.AdamW, lr=1e-2))
    train_data, held_out = samples(held_out=False), samples(held_out=True)
    sample = torch.utils.data.default_collate(train_data[:MICRO_BATCH])
    pipe.profile(sample, micro_batch=MICRO_BATCH, platform="local", repeats=2)
    pipe.optimize(global_batch=GLOBAL_BATCH)
    accuracy = MulticlassAccuracy(2, average="micro")
    validation = Validation(
        data=held_out, metrics={"accuracy": accuracy}, monitor="accuracy", mode="max", patience=2, min_delta=0.01
    )
    result = pipe.train(train_data, epochs=EPOCHS, validation=validation)
    found = [report.values["accuracy"] for report in result.validations]
    print(f"accuracy after each epoch: {', '.join(f'{value:.2f}' for value in found)}")
    print(f"the best after {result.best_step} of {len(result.losses)} steps; {EPOCHS} epochs were allowed")


if __name__ == "__main__":
    main()
