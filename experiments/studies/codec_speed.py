"""How many processor seconds it takes to round a GB of gradients for a message, and to read and add one, by format.

One thread rounds 16 MB of 32-bit numbers as replicas do that sum them: to bf16 by a cast, to int8 in blocks with what
is kept of the step before. It adds what came to a sum. Printed is the least of many times, as other work on the machine
takes the processor's cache away; `codecs` of the specifications of platforms have it.
"""

import json
import time
from collections.abc import Callable

import torch

from funcpipe.comm.block_int8 import blocks_in, quantise, restore
from funcpipe.comm.gradient_chunks import add_rounded
from funcpipe.core.stores import GB

ELEMENTS, REPEAT = 4 * 2**20, 60


def seconds_gb(run: Callable[[], None]) -> float:
    """The least processor seconds of `run` on all elements, for a GB of them."""
    found = []
    for _ in range(REPEAT):
        began_s = time.process_time()
        run()
        found.append(time.process_time() - began_s)
    return min(found) * GB / (4 * ELEMENTS)


def bf16() -> tuple[float, float]:
    """To round and to add. A sum rounds its own contribution and itself, so that is taken from what it takes."""
    values, message = torch.randn(ELEMENTS), torch.empty(ELEMENTS, dtype=torch.bfloat16)
    encode_s = seconds_gb(lambda: _cast(values, message))
    others = {rank: torch.randn(ELEMENTS).to(torch.bfloat16) for rank in range(1, 4)}
    added_s = seconds_gb(lambda: add_rounded(values, others, 0, torch.bfloat16))
    return encode_s, max(0.0, added_s - 2 * encode_s) / 4


def _cast(values: torch.Tensor, message: torch.Tensor) -> None:
    message.copy_(values)


def int8() -> tuple[float, float]:
    values, kept, total = torch.randn(ELEMENTS), torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    whole, scales = torch.empty(ELEMENTS, dtype=torch.int8), torch.empty(blocks_in(ELEMENTS))
    encode_s = seconds_gb(lambda: quantise(values, whole, scales, kept=kept))
    return encode_s, seconds_gb(lambda: restore(whole, scales, total, adds=True))


def main() -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    for name, measure in (("bf16", bf16), ("int8", int8)):
        encode_s, decode_s = measure()
        print(json.dumps({name: {"encode_s_gb": round(encode_s, 3), "decode_s_gb": round(decode_s, 3)}}), flush=True)


if __name__ == "__main__":
    main()
