"""Fine-tune adapters (LoRA) of a Hugging Face language model whose weights stay in their files: functions read them.

    pip install transformers
    python lora_from_files.py [FOLDER]

FOLDER holds a Llama, Mistral or Qwen, for example, as `save_pretrained` writes it. Without one, a small Llama of random
numbers is written first, in several shards.
"""

import sys
from functools import partial
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from funcpipe import FuncPipe

BLOCK = 32


class LoRA(nn.Module):
    """A frozen linear layer plus a trainable product of two matrices of rank `rank`, which begins as zero."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = layer  # whose weights are found in the files by the name of the layer itself
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output and the adapter's."""
        return self.base_layer(x) + self.up(self.down(x))


def adapted(folder: str) -> nn.Module:
    """The model as its config.json says, frozen but for the adapters; it is called where tensors take no memory."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, use_cache=False))
    for layer in model.requires_grad_(False).model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = LoRA(layer.self_attn.q_proj), LoRA(layer.self_attn.v_proj)
    return model


def main() -> None:
    """Train the adapters for an epoch, and write them alone."""
    folder = sys.argv[1] if len(sys.argv) > 1 else "llama"
    if len(sys.argv) < 2:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).save_pretrained(folder, max_shard_size="50KB")
    text = torch.tensor(list("\n".join(topics.values()).encode()[: 64 * BLOCK])).view(-1, BLOCK)
    data = [{"input_ids": tokens, "labels": tokens} for tokens in text]
    pipe = FuncPipe(partial(adapted, folder), weights=folder, optimizer=partial(torch.optim.AdamW, lr=1e-2))
    pipe.profile({"input_ids": text[:4], "labels": text[:4]}, micro_batch=4, platform="local", repeats=1)
    pipe.optimize(global_batch=16)
    result = pipe.train(data)
    state = result.state_dict()  # which reads frozen tensors when they are asked for: here none
    learned = {name: state[name] for name in state if ".down." in name or ".up." in name}
    torch.save(learned, "adapters.pt")
    print(f"loss {result.losses[0]:.2f} -> {result.losses[-1]:.2f}; wrote {len(learned)} adapters")


if __name__ == "__main__":
    main()
