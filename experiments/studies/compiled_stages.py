"""Does torch.compile pay in a function? A stage compiled alone, beside the same stage as functions run it.

Small models are cut in two. Their first stage runs forward and backward on one micro-batch, with one thread, in turn
eagerly and compiled (inductor, its defaults, an empty cache). Seconds are the processor's, with the C++ compiler's, and
the best of several; dropout is off. Memory is that of a process which does only the one or the other.

    eager, compiled ms  forward and backward of one micro-batch
    compile s           what the first micro-batch takes longer than the others
    paid after          micro-batches until compiling has saved what it took
    in a life           work of a function that lives for 900 s, relative to that of an eager one
    eager, compiled MB  peak resident memory of the process; the C++ compiler's comes on top
    off                 length of the difference of its gradients from eager ones, relative to their length
    off by cut          the same between gradients of two compiled stages and of the whole model compiled at once

    python -m experiments.studies.compiled_stages
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from experiments.models import characters, digits, resnet
from funcpipe.model.graph import trace
from funcpipe.model.split import StageModule, split

LIFE_S, REPEATS = 900.0, 100
TITLE = (
    "| first of two stages | eager ms | compiled ms | compile s | paid after | in a life | eager MB | compiled MB "
    "| off | off by cut |"
)
Made = tuple[nn.Module, dict[str, Tensor]]


def gpt2() -> Made:
    from experiments.studies.model_zoo import ZOO, words

    model: Any = ZOO["GPT-2 (tied)"].model()
    model.config.use_cache = False
    return model, {"input_ids": torch.stack([words() for _ in range(4)])}


MODELS: dict[str, Callable[[], Made]] = {
    "MLP, 6 x 512": lambda: (
        nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU()))),
        {"input": torch.randn(16, 512)},
    ),
    "digits (residual)": lambda: (digits.model(), {"images": digits.sample()[0]}),
    "ResNet-14": lambda: (resnet.ResNet(blocks=(1, 1, 1, 1), width=32), {"images": torch.randn(4, 3, 96, 96)}),
    "characters (GPT)": lambda: (characters.model(), {"characters": characters.sample()[0]}),
    "GPT-2, 6 x 384 (transformers)": gpt2,
}


def make(name: str) -> tuple[tuple[StageModule, ...], StageModule, dict[str, Tensor]]:
    """Two stages, the whole as one, and the inputs of one micro-batch."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    graph = trace(model, (), inputs)
    count = len(graph.layers)
    return split(graph, [(0, count // 2), (count // 2, count)]), split(graph, [(0, count)])[0], inputs


def forward_backward(stages: Sequence[nn.Module], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run stages one after the other, and backwards from given gradients of what the last makes: all gradients."""
    values, output = dict(inputs), None
    for stage in stages:
        sent, output = stage(values)
        values |= sent
    made = sent.values() if output is None else [getattr(output, "logits", output)]
    roots = [tensor for tensor in made if tensor.requires_grad]
    torch.autograd.backward(roots, [torch.linspace(-1, 1, root.numel()).view(root.shape) for root in roots])
    found: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in getattr(stage, "_orig_mod", stage).named_parameters():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:  # that of a weight which stages share is the sum of theirs
                found[name] = found[name] + gradient if name in found else gradient
    return found


def off(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The length of the difference of all gradients, relative to theirs; 0 for equal bits."""
    differences = [found[name] - gradient for name, gradient in expected.items()]
    return math.sqrt(sum(d.square().sum() for d in differences) / sum(g.square().sum() for g in expected.values()))


def compiled(stage: nn.Module) -> Any:
    return torch.compile(stage)


def processor_s() -> float:
    """Seconds of processor of this process and of the children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def measure(name: str, kind: str) -> dict[str, float]:
    """Run the first stage in this process, `eager` or `compiled`; if compiled, time both in turn."""
    torch.set_num_threads(1)
    (eager, second), whole, inputs = make(name)
    run = eager if kind == "eager" else compiled(eager)
    first_s = seconds(run, inputs)
    forward_backward([run], inputs)
    figures = {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    if kind == "compiled":
        pairs = [(seconds(eager, inputs), seconds(run, inputs)) for _ in range(REPEATS)]
        figures["eager_s"], figures["s"] = (min(taken) for taken in zip(*pairs, strict=True))
        figures["compile_s"] = first_s - figures["s"]
        figures["off"] = off(forward_backward([run], inputs), forward_backward([eager], inputs))
        by_stages = forward_backward([run, compiled(second)], inputs)
        figures["off_by_cut"] = off(by_stages, forward_backward([compiled(whole)], inputs))
    return figures


def seconds(stage: nn.Module, inputs: Mapping[str, Tensor]) -> float:
    start = processor_s()
    forward_backward([stage], inputs)
    return processor_s() - start


def in_process(name: str, kind: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, "-m", "experiments.studies.compiled_stages", name, "--measure", kind]
        done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def row(name: str, plain: Mapping[str, float], fused: Mapping[str, float]) -> str:
    eager_s, s, compile_s = fused["eager_s"], fused["s"], fused["compile_s"]
    paid = f"{compile_s / (eager_s - s):,.0f}" if eager_s > s else "never"
    life = max(0.0, LIFE_S - compile_s) / LIFE_S * eager_s / s
    cells = [name, f"{1e3 * eager_s:.1f}", f"{1e3 * s:.1f}", f"{compile_s:.0f}", paid, f"{life:.2f}"]
    cells += [f"{figures['peak_mb']:.0f}" for figures in (plain, fused)]
    return "| " + " | ".join([*cells, f"{fused['off']:.0e}", f"{fused['off_by_cut']:.0e}"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help="names, by default all")
    parser.add_argument("--measure", choices=["eager", "compiled"], help="measure one model in this process, as JSON")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.models[0], options.measure)))
    else:
        print(TITLE + "\n" + "|---" * 10 + "|")
        for name in options.models:
            print(row(name, in_process(name, "eager"), in_process(name, "compiled")), flush=True)


if __name__ == "__main__":
    main()
