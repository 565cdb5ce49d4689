"""Functions train without the compiler, which takes seconds to load, and have it when it is wanted.

Each of the two programs runs in a process of its own, forked from one that has imported torch alone.
"""

import json
import subprocess
import sys
from collections.abc import Mapping

import pytest

EAGER = """
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

LOOKED_AT = """
import inspect
inspect.getmodule(sys._getframe())
assert "torch._dynamo.config" not in sys.modules, "the compiler was loaded"
import torch.distributed.tensor
"""

FORKS = """
import json, os, sys, traceback
import torch
from funcpipe.worker.deferred_compiler import defer_compiler
defer_compiler()
told = {}
for name, program in json.loads(sys.argv[1]).items():
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(reads)
        try:
            exec(compile(program, name, "exec"), {"__name__": "__main__", "sys": sys, "torch": torch})
        except BaseException:
            os.write(writes, traceback.format_exc().encode()[-4000:])
            os._exit(1)
        os._exit(0)
    os.close(writes)
    said = os.fdopen(reads).read()
    told[name] = said if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 else said or "it has ended"
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told() -> Mapping[str, str]:
    """The error of each program; empty where it has ended well."""
    programs = json.dumps({"eager": EAGER, "looked at": LOOKED_AT})
    ended = subprocess.run([sys.executable, "-c", FORKS, programs], check=True, capture_output=True, text=True)
    errors: dict[str, str] = json.loads(ended.stdout)
    return errors


def test_optimisers_work_without_the_compiler_and_the_compiler_is_there_when_it_is_wanted(
    told: Mapping[str, str],
) -> None:
    assert told["eager"] == ""


def test_whoever_looks_through_all_modules_does_not_load_the_compiler(told: Mapping[str, str]) -> None:
    """As torch does while operators are defined, in the middle of imports that the compiler needs itself."""
    assert told["looked at"] == ""
