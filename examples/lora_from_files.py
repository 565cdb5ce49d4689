"""Fine-tune adapters (LoRA) of a Hugging Face language model whose weights stay in their files: functions read them.

    pip install transformers
    python lora_from_files.py FOLDER

FOLDER holds a Llama, Mistral or Qwen, for example, as `save_pretrained` writes it, in one file or in shards.
"""

import sys
from functools import partial
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from funcpipe import FuncPipe


class LoRA(nn.Module):
    """A layer, whose weights are found in the files by its own name, plus a product of two matrices that learns."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.down = base_layer, nn.Linear(base_layer.in_features, 4, bias=False)
        self.up = nn.Linear(4, base_layer.out_features, bias=False)
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


if __name__ == "__main__":
    text = torch.tensor(list("\n".join(topics.values()).encode()[:2048])).view(-1, 32)
    data = [{"input_ids": tokens, "labels": tokens} for tokens in text]
    pipe = FuncPipe(partial(adapted, sys.argv[1]), weights=sys.argv[1], optimizer=partial(torch.optim.AdamW, lr=1e-2))
    result = pipe.fit(data, global_batch=16, micro_batch=4)
    state = result.state_dict()  # which reads frozen tensors when they are asked for: here none
    torch.save({name: state[name] for name in state if ".down." in name or ".up." in name}, "adapters.pt")
    print(f"loss {result.losses[0]:.2f} -> {result.losses[-1]:.2f}")
