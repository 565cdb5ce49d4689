"""How Lambda counts invocations that functions make of functions, and which it drops.

After docs.aws.amazon.com/lambda/latest/dg/invocation-recursion.html, 2026-11: a tracing header says how often a chain
has invoked functions, and the SDKs in functions pass it on; after about 16 the next invocation is dropped, and recorded
as a failure, unless the function's RecursiveLoop is Allow. What the record then says is not documented.
"""

import json
import re

LONGEST = 16
DROPPED = json.dumps(
    {"errorType": "RecursiveInvocation", "errorMessage": "the function was invoked in a loop"}
).encode()

_COUNT = re.compile(r"(?<=;Lineage=1:5759e988:)\d+")
_BEGIN = "Root=1-00000000-000000000000000000000000;Parent=0000000000000000;Sampled=0;Lineage=1:5759e988:0"


def length(trace: str) -> int:
    """How many functions the chain has invoked."""
    found = _COUNT.search(trace)
    assert found is not None
    return int(found[0])


def longer(trace: str | None) -> str:
    """The header of an invocation that was asked for with the header `trace`; None begins a chain."""
    before = trace or _BEGIN
    return _COUNT.sub(str(length(before) + 1), before)
