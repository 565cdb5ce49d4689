"""Make the numbers of a graph functions of the sizes of its inputs, and have the graph check what that takes for
granted.

Code asks tensors for their sizes and computes with them. If stages sent each other such numbers, they would depend on
each other all over the model. So a size that was a function of free sizes in all runs is computed from these instead,
in every stage for itself; a node behind the tensor checks on every micro-batch that it is that function.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch.fx.node import Argument

from funcpipe.model.graph.node_functions import EXPECTATIONS, expect_number, expect_sizes, linear
from funcpipe.model.graph.observations import NodeRecord, TensorFacts
from funcpipe.model.graph.program import is_number, map_leaves
from funcpipe.model.graph.symbols import Form, Symbol, Symbols
from funcpipe.model.tensors import LEAF

Node = torch.fx.Node
_Runs = Sequence[Mapping[str, NodeRecord]]

InputSizes = dict[str, dict[int, int | str]]
"""The sizes of inputs that a graph takes for granted, by input and dimension: a number, or the name of a free size."""


def resolve_sizes(
    module: torch.fx.GraphModule, outputs: Sequence[Any], runs: _Runs, symbols: Symbols, records: dict[str, NodeRecord]
) -> tuple[tuple[Any, ...], InputSizes]:
    """Compute numbers that follow from sizes of tensors from the free sizes of the inputs, which become placeholders.

    `runs` are the records of the nodes for each run that `symbols` knows; `records`, those for the sample, gets new
    nodes' too. Returns the new `outputs`, and what is taken for granted about inputs.
    """
    graph = module.graph
    sizes = _Sizes(graph, runs, symbols, records)
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method") or node.target in EXPECTATIONS or node.name not in runs[0]:
            continue
        if node.meta.get("data_sized"):
            continue  # such a number is no function of the inputs' sizes, whatever it was in these runs
        if reads_size(node):
            sizes.resolve_read(node)
        elif node.all_input_nodes and sizes.numbers.issuperset(node.all_input_nodes):
            sizes.resolve_derived(node)
    outputs = tuple(sizes.replaced.get(leaf, leaf) if isinstance(leaf, Node) else leaf for leaf in outputs)
    inputs = sizes.expect()
    kept = {leaf for leaf in outputs if isinstance(leaf, Node)}
    for node in reversed(list(graph.nodes)):
        if node in sizes.numbers and not node.users and node not in kept:
            graph.erase_node(node)
    return outputs, inputs


def reads_size(node: Node) -> bool:
    """Return whether a node asks a tensor for its sizes, or for how many dimensions or elements it has."""
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel", "nelement", "ndimension", "__len__")
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim")
    return node.target in (torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default, len)


@dataclass
class _Read:
    """Assumptions about one tensor: its rank, its sizes by dimension, and the code that read them."""

    rank: int | None = None
    sizes: dict[int, Argument] = field(default_factory=dict)
    forms: dict[int, Form] = field(default_factory=dict)
    place: tuple[str, str] = ("", "code that is traced")


class _Sizes:
    """The numbers of a graph: which nodes compute them, and what replaces these."""

    def __init__(self, graph: torch.fx.Graph, runs: _Runs, symbols: Symbols, records: dict[str, NodeRecord]) -> None:
        self.numbers: set[Node] = set()
        self.replaced: dict[Node, Any] = {}
        self._graph = graph
        self._runs = runs
        self._symbols = symbols
        self._records = records
        self._forms: dict[Form, Node] = {}
        self._same: dict[Any, Node] = {}
        self._last: Node | None = None
        self._reads: dict[Node, _Read] = {}

    def resolve_read(self, node: Node) -> None:
        """Replace what `node` has read, if it is the same in all runs or a function of the free sizes."""
        tensor = node.args[0]
        leaves = [run[node.name].leaves for run in self._runs]
        assert isinstance(tensor, Node)
        if not all(isinstance(run[tensor.name].leaves[0], TensorFacts) for run in self._runs):
            return
        self.numbers.add(node)
        place = node.meta.get("asked")  # set if code has got Python numbers
        known = tensor.op == "get_attr"
        read = _Read() if known else self._reads.setdefault(tensor, _Read())
        if place is not None:
            read.place = place
        if self._whole(node):
            self._resolve_shape(node, read, leaves)
        elif node.target in ("numel", "nelement", torch.ops.aten.sym_numel.default):
            self._resolve_count(node, [items[0] for items in leaves], known)
        elif node.target in ("dim", "ndimension", getattr):
            read.rank = leaves[0][0] if len({items[0] for items in leaves}) == 1 else read.rank
            self._replace(node, leaves[0][0] if read.rank is not None or known else None)
        else:
            dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
            assert isinstance(dim, int)
            self._resolve_size(node, read, dim, [items[0] for items in leaves])

    @staticmethod
    def _whole(node: Node) -> bool:
        if node.target is getattr:
            return node.args[1] == "shape"
        return node.target == "size" and len(node.args) == 1 and not node.kwargs

    def _resolve_shape(self, node: Node, read: _Read, leaves: Sequence[tuple[Any, ...]]) -> None:
        if len({len(items) for items in leaves}) != 1:
            return
        columns = list(zip(*leaves, strict=True))
        if "asked" in node.meta:  # code has got all sizes that did not change
            read.rank = len(columns)
            for i, column in enumerate(columns):
                form = self._symbols.form(column)
                if form is not None and form.symbol is None:
                    read.sizes[i], read.forms[i] = form.offset, form
        for user in list(node.users):
            if user.target is operator.getitem and isinstance(user.args[1], int):
                self.numbers.add(user)
                i = user.args[1] if user.args[1] >= 0 else user.args[1] + len(columns)
                self._resolve_size(user, read, i, columns[i])

    def _resolve_size(self, node: Node, read: _Read, dim: int, column: Sequence[int]) -> None:
        if not node.users and "asked" not in node.meta:
            return
        form = self._symbols.form(column)
        if form is not None:
            literal = self._literal(form)
            read.sizes[dim], read.forms[dim] = literal, form
            self._replace(node, literal)

    def _resolve_count(self, node: Node, column: Sequence[int], known: bool) -> None:
        form = self._symbols.form(column)
        if form is None:
            return
        literal = self._literal(form)
        if not known:
            path, where = node.meta.get("asked", ("", "code that is traced"))
            users = list(node.users)
            with self._graph.inserting_after(node):
                check = self._graph.call_function(expect_number, (node, path, where, literal))
            self._added(check, node)
            self._replace(node, literal, users)
        else:
            self._replace(node, literal)

    def resolve_derived(self, node: Node) -> None:
        """Compute what `node` makes of numbers once, and at once if they are constants."""
        leaves = [run[node.name].leaves for run in self._runs if node.name in run]
        if any(isinstance(leaf, TensorFacts) for leaf in leaves[0]) or self._runs[0][node.name].draws:
            return
        self.numbers.add(node)
        if node.target is linear and node.args[1:] == (1, 0):
            self._replace(node, node.args[0])
            return
        whole = node.args[0] if node.target is operator.getitem else None
        if isinstance(whole, tuple | list) and isinstance(node.args[1], int):
            self._replace(node, whole[node.args[1]])
            return
        if not node.all_input_nodes and self._runs[0][node.name].tree is LEAF and is_number(leaves[0][0]):
            self._replace(node, leaves[0][0])
            return
        try:
            same = self._same.setdefault((node.op, node.target, node.args, tuple(node.kwargs.items())), node)
        except TypeError:  # arguments that are not hashable
            return
        if same is not node:
            self._replace(node, same)

    def _replace(self, node: Node, literal: Any, users: Sequence[Node] | None = None) -> None:
        if literal is None:
            return
        self.replaced[node] = literal
        for user in list(node.users) if users is None else users:
            user.args = map_leaves(user.args, lambda leaf: literal if leaf is node else leaf)
            user.kwargs = map_leaves(user.kwargs, lambda leaf: literal if leaf is node else leaf)

    def _literal(self, form: Form) -> Any:
        """The number as an argument of nodes: an int, or a node that computes it from the free sizes."""
        if form.symbol is None:
            return form.offset
        if form in self._forms:
            return self._forms[form]
        if form.is_symbol:
            node = self._placeholder(form.symbol)
        elif form.factor is not None:
            line = self._literal(Form(form.offset, form.slope, form.symbol))
            factor = self._literal(Form(0, 1, form.factor))
            node = self._early(operator.mul, (factor, line))
        else:
            symbol = self._literal(Form(0, 1, form.symbol))
            node = self._early(linear, (symbol, form.slope, form.offset))
        self._forms[form] = node
        self.numbers.add(node)
        self._records[node.name] = NodeRecord(LEAF, (form.at_sample,))
        return node

    def _placeholder(self, symbol: Symbol) -> Node:
        with self._graph.inserting_before(next(iter(self._graph.nodes))):
            node = self._graph.placeholder(symbol.name.replace(" ", "_"))
        node.meta["symbol"] = symbol
        self._last = self._last or node
        return node

    def _early(self, target: Any, args: tuple[Any, ...]) -> Node:
        """A new node behind all those that compute numbers from the free sizes so far."""
        assert self._last is not None
        with self._graph.inserting_after(self._last):
            self._last = self._graph.call_function(target, args)
        return self._last

    def _added(self, check: Node, behind: Node) -> None:
        check.meta = {key: item for key, item in behind.meta.items() if key in ("call", "autocast")}
        self._records[check.name] = NodeRecord(LEAF, (None,))

    def expect(self) -> InputSizes:
        """Add a node behind every tensor whose sizes are taken for granted; return what is of the model's inputs."""
        inputs: InputSizes = {}
        for tensor, read in self._reads.items():
            if tensor.op == "placeholder":
                claims = inputs.setdefault(tensor.meta["input"], {})
                rank = len(self._runs[0][tensor.name].leaves[0].shape)
                for dim, form in read.forms.items():
                    self._claim(claims, dim % rank, form, tensor, read)
            elif read.sizes or read.rank is not None:
                self._expect(tensor, read.place, read.rank, read.sizes)
        return inputs

    def _claim(self, claims: dict[int, int | str], dim: int, form: Form, tensor: Node, read: _Read) -> None:
        if form.symbol is None:
            claims[dim] = form.offset
        elif form.is_symbol:
            claims[dim] = form.symbol.name
        else:
            self._expect(tensor, read.place, None, {dim: self._literal(form)})

    def _expect(self, tensor: Node, place: tuple[str, str], rank: int | None, sizes: Mapping[int, Argument]) -> None:
        pairs = [item for pair in sizes.items() for item in pair]
        inputs = [node for node in self._graph.nodes if node.op == "placeholder"]
        with self._graph.inserting_after(inputs[-1] if tensor in inputs else tensor):
            check = self._graph.call_function(expect_sizes, (tensor, *place, rank, *pairs))
        self._added(check, tensor)
