import subprocess
import sys

import pytest

EAGER = """
import sys
import torch
from funcpipe.worker.deferred_compiler import defer_compiler
defer_compiler()
model = torch.nn.Linear(4, 3)
for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop):
    optimizer = kind(model.parameters(), lr=0.1)
    before = model.weight.clone()
    output = model(torch.ones(2, 4))
    torch.autograd.backward([output], [torch.ones_like(output)])
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not torch.equal(before, model.weight), kind

@torch.compiler.disable
def one(x): return x + 1
@torch.compiler.disable(recursive=False, reason="as packages say it")
def two(x): return x + 2
assert one(1) == 2 and two(1) == 3
assert "torch._dynamo.config" not in sys.modules, "the compiler was loaded"
assert "sympy" not in sys.modules, "the algebra of shapes was loaded"
try:
    torch.autograd.backward([model(torch.ones(2, 4))], [torch.ones(3, 2)])
except RuntimeError as error:
    assert "Mismatch in shape" in str(error)
else:
    raise AssertionError("gradients of any shape are taken")
double = torch.compile(lambda x: x * 2, backend="eager")
assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))
assert "torch._dynamo.config" in sys.modules
import torch._dynamo
assert torch._dynamo is sys.modules["torch._dynamo"]
optimizer.step()
"""


@pytest.mark.slow
def test_optimisers_work_without_the_compiler_and_the_compiler_is_there_when_it_is_wanted() -> None:
    subprocess.run([sys.executable, "-c", EAGER], check=True, timeout=120)


LOOKED_AT = """
import inspect
import sys
import torch
from funcpipe.worker.deferred_compiler import defer_compiler
defer_compiler()
inspect.getmodule(sys._getframe())
assert "torch._dynamo.config" not in sys.modules, "the compiler was loaded"
import torch.distributed.tensor
"""


@pytest.mark.slow
def test_whoever_looks_through_all_modules_does_not_load_the_compiler() -> None:
    """As torch does while operators are defined, in the middle of imports that the compiler needs itself."""
    subprocess.run([sys.executable, "-c", LOOKED_AT], check=True, timeout=120)
