"""Tell the calls of a traced graph that draw random numbers how they are seeded."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch.fx

from funcpipe.errors import ModelError
from funcpipe.model.draws import GENERATORS, Draws, is_from_torch, module_draw, operator_draw
from funcpipe.model.graph.observe import NodeRecord
from funcpipe.model.graph.program import attribute


def mark_draws(module: torch.fx.GraphModule, runs: Sequence[Mapping[str, NodeRecord]]) -> None:
    """Set `draws` in the meta of the nodes of `module` that draw, in the order of the user's code.

    `runs` are the records of its nodes for several inputs. Raises ModelError for a call whose draws cannot be told
    apart.
    """
    calls: Counter[str] = Counter()
    draws = 0
    for node in module.graph.nodes:
        records = [run[node.name] for run in runs if node.name in run]
        used = frozenset[str]().union(*(record.draws for record in records))
        if any(record.operators_that_draw for record in records):
            used |= {"torch"}  # though it may have drawn nothing for these inputs
        if node.op == "call_module":
            path = str(node.target)
            calls[path] += 1
            generators = used if is_from_torch(attribute(module, path)) else frozenset(GENERATORS)
            if generators:
                node.meta["draws"] = Draws((module_draw(path, calls[path]),), generators)
        elif used:
            count = _operators_that_draw(node, records)
            node.meta["draws"] = Draws(tuple(operator_draw(draws + i + 1) for i in range(count)), used)
            draws += count


def _operators_that_draw(node: torch.fx.Node, records: Sequence[NodeRecord]) -> int:
    counts = {record.operators_that_draw for record in records if record.operators_that_draw is not None}
    if len(counts) == 1 and 0 not in counts:
        return counts.pop()
    path = (node.meta.get("call") or ("", None))[0]
    where = f"in {path}" if path else "in the model's own forward"
    why = "is an operator without torch.Tag.nondeterministic_seeded" if 0 in counts else "varies with the inputs"
    raise ModelError(
        f"{node.target} {where} draws random numbers, and {why}; move it into a module of its own and name that among "
        "the blocks, or draw with torch's functions"
    )
