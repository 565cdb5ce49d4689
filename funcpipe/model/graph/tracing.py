"""`trace`: an ordinary module and a sample of its inputs become a graph of layers.

    code of a forward           nodes               layers        stages of a plan
    x = self.embed(ids)         embed               embed         0
    x = x + self.position       position, add         |           |
    x = self.block(x)           block               block         |
    x = F.relu(x)               relu                  |           |    -- value "relu" -->    <-- its gradient --
    return self.head(x)         head                head          1

The model runs on small batches of several sizes (`runs`). The tracers make graphs of it, one after the other: torch.fx
is the fastest, torch.export follows sizes that fx cannot, the eager tracer records any code, of which it keeps the
parts that it cannot record as blocks. The first graph that computes what the model did in all runs, with the same
random numbers, buffers and gradients (`equivalence`), is taken, and its nodes are grouped into layers (`assemble`).
"""

import contextlib
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from funcpipe.core import Precision
from funcpipe.errors import ModelError
from funcpipe.model.graph.assemble import assemble, cleanup
from funcpipe.model.graph.blocks import (
    block_notes,
    closed_blocks,
    first_assigned,
    next_blocks,
    one_layer_note,
    trace_whole,
)
from funcpipe.model.graph.carried import carried_state
from funcpipe.model.graph.eager_graph import trace_eager
from funcpipe.model.graph.eager_tracer import NonTorchRandomness
from funcpipe.model.graph.equivalence import Example, compare, example
from funcpipe.model.graph.fx_tracer import trace_fx
from funcpipe.model.graph.inputs import Collated, Signature, holds, needed_guards, signature_of
from funcpipe.model.graph.isolation import forward_only, preserve_state, tried_in_turn
from funcpipe.model.graph.model_checks import check_model, tied_names
from funcpipe.model.graph.modes import WAS_IN_EVAL_MODE, check_modes, evaluation_mode, training_mode
from funcpipe.model.graph.observations import NodeRecord, difference_of
from funcpipe.model.graph.patches import as_if_exporting, transparent_checkpoints, without_torch_logs
from funcpipe.model.graph.program import attribute, autocast_to
from funcpipe.model.graph.python_state import read_state
from funcpipe.model.graph.repeated import RepeatedBlocks, made_whole, repeated_blocks, shortened
from funcpipe.model.graph.running_statistics import changed_buffers, within_blocks
from funcpipe.model.graph.runs import CollatedRuns, CutRuns, ExampleSet, Runs
from funcpipe.model.graph.symbols import Symbols
from funcpipe.model.graph.tracers import LengthsFixed, TooSlow, Traced, TraceRequest, Unrecordable
from funcpipe.model.graph.user_code import described, find_random_draw, first_difference, source_location, with_code
from funcpipe.model.graph.values import Attempt, LayerGraph
from funcpipe.model.tensors import is_dense, is_weightless

_log = logging.getLogger(__name__)


@tried_in_turn
def trace(
    model: nn.Module,
    sample: tuple[Any, ...],
    sample_kwargs: Mapping[str, Any] = {},
    *,
    blocks: Sequence[str] = (),
    precision: Precision = Precision.FP32,
    training: bool = True,
    collated: Collated | None = None,
    logged_notes: set[str] | None = None,
) -> LayerGraph:
    """The layers of `model`, as it runs in training, or else in eval mode, on inputs like `sample` and
    `sample_kwargs`, with autocast to `precision` around it. Other batches are cut from the sample along its first
    dimension; where that is not the batch, they are `collated`.

    Later inputs may have another batch size, and other lengths where the graph can follow them. The graph checks what
    it takes for granted about them, and raises DataError where it would not be right. `blocks` are paths of modules
    that become one layer each. The model is not changed; the graph holds its parameters by reference. Notes that
    `logged_notes` lacks are logged, and added to it. Raises ModelError if the model cannot be traced.
    """
    signature = signature_of(model, sample, sample_kwargs)
    inputs = signature.bind(sample, sample_kwargs)
    check_model(model, blocks)
    check_modes(model, training=training)
    mode_notes = (WAS_IN_EVAL_MODE,) if training and not model.training else ()
    called = _Called(model, signature, inputs, collated, tuple(blocks))
    mode = (training_mode if training else evaluation_mode)(model, shortcuts=True)
    with mode, autocast_to(precision, cached=False):
        graph = _weightless_graph(called) if is_weightless(model) else _layer_graph(called)
        assert graph is not None
    graph = replace(graph, notes=(*mode_notes, *graph.notes), precision=precision)
    _log_notes(graph, set() if logged_notes is None else logged_notes, logging.WARNING if training else logging.DEBUG)
    return graph


@dataclass(frozen=True)
class _Called:
    """A model, and what it is traced with."""

    model: nn.Module
    signature: Signature
    inputs: Mapping[str, Tensor]
    collated: Collated | None
    blocks: tuple[str, ...]

    def runs(self) -> Runs:
        """The model's own runs on small batches."""
        given = (self.model, self.signature, self.inputs)
        return CutRuns(*given) if self.collated is None else CollatedRuns(*given, self.collated)


def _weightless_graph(called: _Called) -> LayerGraph | None:
    """The layers of a model without weights: of its code as it runs in a script, which then computes the same bits; or,
    where more of that must become blocks, as it takes no shortcuts that depend on data.
    """
    for find in (_by_repeated_blocks, _layer_graph):
        plain: LayerGraph | None = None
        with contextlib.suppress(ModelError):  # the code looks into what follows from weights
            plain = find(called)
        if plain is not None and set(plain.blocks) <= set(called.blocks):
            return plain
        with as_if_exporting():
            careful = find(called)
        if careful is not None:
            return plain if plain and set(plain.blocks) <= set(careful.blocks) else replace(careful, shortcuts=False)
    return None


def _by_repeated_blocks(called: _Called) -> LayerGraph | None:
    """The layers, of which few blocks of each kind were traced; None if the model has no such blocks, or if they do
    not stand for the others.
    """
    lists = repeated_blocks(called.model) if not called.blocks else ()
    if not lists:
        return None
    try:
        return _layer_graph(called, lists)
    except Exception as error:  # noqa: BLE001 - code may refuse to run with fewer blocks; all of them are tried next
        _log.debug("%s with fewer blocks: %s", type(called.model).__name__, error)
        return None


def _layer_graph(called: _Called, lists: Sequence[RepeatedBlocks] = ()) -> LayerGraph | None:
    """The layers, by a graph that agrees with the model; if all blocks but three of these lists are left out at first,
    None if those three do not stand for the others.
    """
    model, signature, inputs = called.model, called.signature, called.inputs
    with shortened(model, lists):
        start, runs = read_state(model), called.runs()
        changed = {name for one in runs.pair for name in (*one.result.buffers, *one.result.written)}
        buffers = changed_buffers(model, signature, runs.pair, tied_names(model, changed))
        carried, runs.later = carried_state(model, signature, start, runs.pair, buffers.others, runs.batches)
        request = TraceRequest(
            model,
            signature,
            (runs.first.inputs, runs.first.inputs),
            (runs.first.samples, runs.first.samples),
            closed_blocks(model, (*called.blocks, *carried.blocks)),
            runs.saves_tensors,
            frozenset(changed),
        )
        found, attempts = _traced(request, runs)
    if lists:
        whole = None if changed or runs.later or found.request.blocks else _made_whole(found, runs.first, lists)
        if whole is None:
            return None
        found = whole
    buffers = within_blocks(model, buffers, found.request.blocks)
    carried = replace(carried, buffers=buffers.others, statistics=buffers.reason)
    graph = assemble(found.request, found.traced, found.runs, found.symbols, inputs, runs.batched, carried.blocks)
    graph = replace(
        graph,
        statistics=buffers.statistics,
        tied_names=tied_names(model, changed),
        carried=carried,
        attempts=attempts,
        notes=(*graph.notes, *found.notes, *carried.notes),
        compared=found.compared,
        blocks=tuple(sorted(found.request.blocks)),
    )
    return replace(graph, notes=(*graph.notes, *one_layer_note(graph)))


def _made_whole(found: "_Found", first: Example, lists: Sequence[RepeatedBlocks]) -> "_Found | None":
    """`found`, with all blocks, if it agrees with a forward and a backward of the whole model; None if it does not."""
    request, whole = found.request, made_whole(found.traced, found.runs, found.request.model, lists)
    if whole is None:
        return None
    traced, runs = whole
    expected = example(
        *(request.model, request.signature, first.inputs),
        seed=first.seed,
        backward=True,
        saves_tensors=first.saves_tensors,
        samples=first.samples,
    )
    (records,), difference = compare(traced, request.model, [expected])
    if difference is not None or records is None:
        return None
    agrees = all(records[name].leaves == record.leaves for name, record in runs[0].items())
    return replace(found, traced=traced, runs=runs) if agrees else None


def _log_notes(graph: LayerGraph, logged: set[str], level: int) -> None:
    for note in graph.notes:
        if note not in logged:
            _log.log(level, "%s: %s", graph.name, note)
    logged.update(graph.notes)


@dataclass(frozen=True)
class _Found:
    """A graph that agrees with the model: the request it was made for, the records of its nodes for the runs that
    `symbols` knows, the batch sizes of these, notes for the user. `refused` is the batch size that the model accepts
    and the graph does not, if there is one.
    """

    request: TraceRequest
    traced: Traced
    runs: list[dict[str, NodeRecord]]
    symbols: Symbols
    compared: frozenset[int]
    notes: tuple[str, ...] = ()
    refused: int | None = None

    @property
    def reason(self) -> str:
        """The reason to look for another graph."""
        return f"the graph refuses batches of {self.refused}, which the model accepts"


@dataclass(frozen=True)
class _Failed:
    """The reason why a tracer failed, the path of the module to blame if that is known, and whether it shall try again
    with the sample's lengths alone.
    """

    reason: str
    path: str | None = None
    may_try_again: bool = True


def _trace_export(request: TraceRequest) -> Traced:
    from funcpipe.model.graph.export_tracer import (
        trace_export,  # with it half a second of torch, which fx can do without
    )

    return trace_export(request)


TRACERS: tuple[tuple[str, Callable[[TraceRequest], Traced]], ...] = (("fx", trace_fx), ("export", _trace_export))


def _traced(request: TraceRequest, runs: Runs) -> tuple[_Found, tuple[Attempt, ...]]:
    """The graph of the first tracer whose graph agrees with the model, and the attempts up to it.

    The last tracer is tried again and again: each time, the module whose code it cannot record becomes a block, then
    the module around that. Before the model itself becomes one, its code runs as if it were exported.
    """
    attempts: list[Attempt] = []
    second_best: tuple[_Found, tuple[Attempt, ...]] | None = None
    for name, tracer in () if "" in request.blocks else TRACERS:
        if name == "export" and (reason := _against_export(request)):
            attempts.append(Attempt(name, reason))
            continue
        result = _attempt_lengths(tracer, request, runs)
        if isinstance(result, _Found):
            if not result.refused:
                return result, (*attempts, Attempt(name))
            second_best = second_best or (result, (*attempts, Attempt(name)))
        attempts.append(Attempt(name, result.reason))
    reasons: dict[frozenset[str], str] = {}
    tracer = trace_whole if "" in request.blocks else trace_eager
    while True:
        result = _attempt(tracer, request, runs.same_lengths)
        if isinstance(result, _Found):
            notes = (*result.notes, *block_notes(request.model, reasons))
            return replace(result, notes=notes), (*attempts, Attempt("eager"))
        blocks = next_blocks(request, result.path)
        if tracer is trace_eager and (second_best is not None or "" in blocks):
            tracer = _trace_exporting
            continue
        if second_best is not None:
            return second_best
        if not blocks:
            raise ModelError(_refusal(request, [*attempts, Attempt("eager", result.reason)], runs.first))
        blocks = closed_blocks(request.model, request.blocks | blocks) - request.blocks
        reasons[blocks] = result.reason
        request = replace(request, blocks=request.blocks | blocks)
        tracer = trace_whole if "" in request.blocks else tracer


def _against_export(request: TraceRequest) -> str:
    """The reason not to try torch.export, if there is one."""
    if request.blocks:
        return "it would look into blocks"
    return "it calls other operators, which must be compared by numbers" if is_weightless(request.model) else ""


def _trace_exporting(request: TraceRequest) -> Traced:
    with as_if_exporting():
        return trace_eager(request)


def _attempt_lengths(tracer: Callable[[TraceRequest], Traced], request: TraceRequest, runs: Runs) -> _Found | _Failed:
    """Trace with lengths that differ, as far as the model allows; if that fails, with the sample's."""
    if runs.other_lengths is not None:
        result = _attempt(tracer, request, runs.other_lengths)
        if isinstance(result, _Found) or not result.may_try_again:
            return result
    return _attempt(tracer, request, runs.same_lengths)


def _attempt(tracer: Callable[[TraceRequest], Traced], request: TraceRequest, chosen: ExampleSet) -> _Found | _Failed:
    examples = chosen.examples
    one, two = examples[:2]
    request = replace(request, examples=(one.inputs, two.inputs), samples=(one.samples, two.samples))
    traced: Traced | None = None
    try:
        with (
            preserve_state(request.model),
            warnings.catch_warnings(),
            without_torch_logs(),
            transparent_checkpoints() as notes,
        ):
            warnings.simplefilter("ignore")  # tracers warn about what the comparison below checks
            traced = tracer(request)
        cleanup(traced, request.model)
        _refuse_sparse_constants(traced)
        runs, difference = compare(traced, request.model, examples)
        if difference is None and chosen.later is not None:
            _, difference = compare(traced, request.model, [chosen.later])
    except NonTorchRandomness as error:
        return _Failed(f"{_draw(request, examples[0])}: {error}", error.path)
    except Unrecordable as error:
        path, reason = source_location(request.model, error)
        if error.where:
            reason = described(request.model, error.path or "", error.where, error)
        return _Failed(reason, path if error.path is None else error.path, not isinstance(error, TooSlow))
    except Exception as error:  # noqa: BLE001 - a user's code and a tracer can raise anything; the next tracer is tried
        of_lengths = isinstance(error, LengthsFixed)
        path, reason = source_location(request.model, (of_lengths and error.__cause__) or error)
        return _Failed(reason, path, traced is not None or of_lengths)
    if difference is None and len(chosen.symbols.free) > 1 and len(runs) - runs.count(None) < 3:
        return _Failed("too few runs are alike to tell what follows from which size")
    if difference is None:
        kept = [i for i, run in enumerate(runs) if run is not None]
        sizes = [{name: tensor.shape for name, tensor in examples[i].inputs.items()} for i in kept]
        guards = needed_guards(traced.guards, sizes)
        broken = [guard for guard in guards if not all(holds(guard, one) for one in (*sizes, chosen.sample))]
        if broken:
            return _Failed(f"the graph is not right for the sample: {broken[0]} does not hold")
        traced = replace(traced, guards=guards)
        compared = frozenset(examples[i].samples for i in kept)
        records = [run for run in runs if run is not None]
        refused = next((examples[i].samples for i, run in enumerate(runs) if run is None), None)
        return _Found(request, traced, records, chosen.symbols.of_runs(kept), compared, tuple(notes), refused)
    if difference.buffers and (assigned := first_assigned(request, examples[0], difference.buffers)):
        return _Failed(assigned[1], assigned[0])
    place = _draw(request, examples[0]) if "generator" in difference.text else None
    return _Failed(f"{place}: {difference.text}" if place else difference.text)


def _refuse_sparse_constants(traced: Traced) -> None:
    for node in traced.module.graph.nodes:
        item = attribute(traced.module, str(node.target)) if node.op == "get_attr" else None
        if isinstance(item, Tensor) and not is_dense(item):
            raise Unrecordable("the graph holds a sparse or quantised tensor, which cannot be saved")


def _draw(request: TraceRequest, one: Example) -> str | None:
    """The line that draws random numbers without torch, if there is one."""
    with preserve_state(request.model), forward_only(one.saves_tensors):
        return find_random_draw(request.model, lambda: request.signature.call(request.model, one.inputs))


def _refusal(request: TraceRequest, attempts: Sequence[Attempt], one: Example) -> str:
    title = type(request.model).__name__

    def again() -> Example:
        return example(request.model, request.signature, one.inputs, seed=one.seed, backward=True)

    difference = difference_of(again().result, one.result)
    if difference is not None:
        where = first_difference(again)
        line = f", first in {with_code(where)}" if where else ""
        return (
            f"{title} gives different results for the same inputs and seeds{line} ({difference.text}): it has a random "
            "number generator of its own, or changes with each call; use torch's global generator instead"
        )
    tried = "\n".join(f"  {attempt.tracer}: {attempt.failure}" for attempt in attempts)
    return (
        f"{title} cannot be traced into a graph of layers, nor run whole. What was tried:\n{tried}\nMake what that "
        "line does a function of the model's inputs, parameters and buffers, and of torch's global generator"
    )
