"""Fine-tune a Hugging Face language model on the text of Python's own documentation, over local functions.

    pip install transformers
    python finetune_hugging_face.py [FOLDER]

FOLDER holds a causal language model as `save_pretrained` writes it, with its tokenizer. Without one, a small GPT-2 with
fresh weights learns the text byte by byte, so that the example runs without a download.
"""

import sys
from functools import partial
from pydoc_data.topics import topics

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    get_linear_schedule_with_warmup,
)

from funcpipe import FuncPipe

BLOCK, EPOCHS, GLOBAL_BATCH, MICRO_BATCH = 64, 1, 32, 8


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Blocks of tokens; a sample is what the model is called with."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.blocks = tokens[: len(tokens) // BLOCK * BLOCK].view(-1, BLOCK)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def load(folder: str | None) -> tuple[torch.nn.Module, torch.Tensor]:
    """The model, and the text as its tokens."""
    text = "\n".join(topics[name] for name in sorted(topics))[:32768]
    if folder is None:
        config = GPT2Config(
            vocab_size=256,
            n_positions=BLOCK,
            n_embd=64,
            n_layer=4,
            n_head=4,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        return GPT2LMHeadModel(config), torch.tensor(list(text.encode()))
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.use_cache = False
    return model, torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])


def main() -> None:
    """Plan two stages at most, and train for one epoch with warm-up."""
    torch.manual_seed(0)
    model, tokens = load(sys.argv[1] if len(sys.argv) > 1 else None)
    data = Blocks(tokens)
    steps = EPOCHS * -(-len(data) // GLOBAL_BATCH)
    pipe = FuncPipe(
        model,  # computes its own loss from `labels`
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        scheduler=partial(get_linear_schedule_with_warmup, num_warmup_steps=4, num_training_steps=steps),
        scheduler_interval="step",
        clip_grad_norm=1.0,
    )
    sample = torch.utils.data.default_collate([data[i] for i in range(MICRO_BATCH)])
    pipe.profile(sample, micro_batch=MICRO_BATCH, platform="local", repeats=2)
    pipe.optimize(global_batch=GLOBAL_BATCH, time_value=3.84)
    result = pipe.train(data, epochs=EPOCHS)
    print(f"{steps} steps: loss {result.losses[0]:.2f} -> {result.losses[-1]:.2f} for each token")


if __name__ == "__main__":
    main()
